/** Models: which there are, whether they fit, downloading, starting, and starting again. */

import type { AppState, LoadProgress, NoticeAction } from "./app_state";
import { type Fit, fitModel, inspectDevice, inspectStorage } from "./device";
import { RateMeter } from "./download/rate_meter";
import {
  placeFiles,
  removeModel,
  removeOldVersions,
  modelUrl,
  storedBytes,
} from "./download/model_cache";
import type { Backend } from "./engine/backend";
import { LoadError, type LoadEvent, LocalEngine, startWorker } from "./engine/local_engine";
import { findServer, ServerEngine } from "./engine/server_engine";
import { fetchModels, type LibraryRecord, type ModelRecord } from "./models";
import { saveSettings } from "./settings";
import type { Store } from "./store";

export interface StartOptions {
  readonly keep?: "cache" | "memory";
  readonly is_thorough?: boolean;
}

/** An engine that is lost again this soon after it was restarted is not restarted once more. */
const RESTART_PAUSE_MS = 60_000;

export class ModelController {
  private local: LocalEngine | null = null;
  private server: ServerEngine | null = null;
  private last_restart_ms = -Infinity;
  private last_options: StartOptions = {};

  constructor(
    private readonly store: Store<AppState>,
    /** The page's address, below which everything lies. */
    private readonly base: string,
  ) {}

  /** What answers now, or null. */
  get backend(): Backend | null {
    const { phase } = this.store.state.engine;
    if (phase === "ready") return this.local;
    return phase === "server" ? this.server : null;
  }

  /** Looks at host, device and storage; starts the last model if it is stored here. */
  async begin(): Promise<void> {
    const [{ models, has_server }, device] = await Promise.all([
      fetchModels(this.base).catch((error: unknown) => {
        this.fail(error instanceof Error ? error.message : String(error));
        return { models: [], has_server: false };
      }),
      inspectDevice(),
    ]);
    const { model_id } = this.store.state.settings;
    const selected = models.find((model) => model.id === model_id) ?? models[0];
    this.store.set({ models, device, selected_id: selected?.id ?? null });
    const fit = selected === undefined ? null : this.fit(selected);
    const can_run = fit?.fits === true;
    // A host that announces no server may still have one: ask where nothing else would answer.
    const server_name = has_server || !can_run ? await findServer(this.base) : null;
    if (server_name !== null) this.server = new ServerEngine(this.base, server_name);
    await this.refreshStorage();
    this.store.set({ server_name, engine: { phase: "idle" } });
    if (!can_run) {
      this.useServer();
    } else if (selected?.id === model_id && this.isStored(selected, fit.library)) {
      await this.start();
    }
  }

  fit(model: ModelRecord): Fit {
    const { device } = this.store.state;
    return device === null ? { fits: false, reason: "" } : fitModel(model, device);
  }

  select(model_id: string): void {
    this.store.set({ selected_id: model_id });
  }

  /** Bytes of all that running the model here needs. */
  neededBytes(model: ModelRecord): number {
    const fit = this.fit(model);
    const library = fit.fits ? fit.library : model.libraries[0];
    const files = model.files.reduce((sum, file) => sum + file.num_bytes, 0);
    return files + (library?.num_bytes ?? 0);
  }

  private isStored(model: ModelRecord, library: LibraryRecord): boolean {
    const needed = model.files.reduce((sum, file) => sum + file.num_bytes, library.num_bytes);
    return this.store.state.stored_bytes[model.id] === needed;
  }

  useServer(): void {
    const { server_name } = this.store.state;
    if (server_name === null) return;
    this.local?.dispose();
    this.local = null;
    this.store.set({ engine: { phase: "server", name: server_name }, notice: null });
  }

  /** Downloads what is missing of the selected model, and starts it. */
  async start(options: StartOptions = {}): Promise<void> {
    const { models, selected_id, settings } = this.store.state;
    const model = models.find((candidate) => candidate.id === selected_id);
    if (model === undefined) return;
    const fit = this.fit(model);
    if (!fit.fits) {
      this.fail(fit.reason);
      return;
    }
    this.local?.dispose();
    this.last_options = options;
    const engine = new LocalEngine(startWorker(), (why) => void this.restart(engine, why));
    this.local = engine;
    this.store.set({
      engine: { phase: "loading", model, progress: { step: "checking" } },
      notice: null,
      settings: { ...settings, model_id: model.id },
    });
    saveSettings(this.store.state.settings);
    const keep = options.keep ?? "cache";
    try {
      if (keep === "cache") await askToPersist();
      await engine.load(
        {
          model_id: model.id,
          model_url: modelUrl(model, this.base),
          library_url: new URL(fit.library.path, modelUrl(model, this.base)).href,
          features: fit.library.features,
          files: placeFiles(model, fit.library, this.base),
          context_window_size: Math.min(model.context_window_size, settings.context_window_size),
          keep,
          is_thorough: options.is_thorough ?? false,
        },
        this.follow(model, engine),
      );
      if (this.local !== engine) return;
      const is_f16 = fit.library.features.includes("shader-f16");
      this.store.set({
        engine: { phase: "ready", model, precision: is_f16 ? "f16" : "f32" },
        announcement: `${model.name} is ready.`,
      });
      await removeOldVersions(model, this.base, caches).catch(() => undefined);
    } catch (error) {
      if (this.local === engine) this.loadFailed(error, options);
    } finally {
      await this.refreshStorage();
    }
  }

  /** Stops a download; what has arrived is kept. */
  cancel(): void {
    this.local?.cancelLoad();
  }

  /** Hashes every stored byte of the selected model, and brings again what is wrong. */
  async check(): Promise<void> {
    await this.start({ is_thorough: true });
  }

  async remove(model: ModelRecord): Promise<void> {
    const { engine } = this.store.state;
    if ((engine.phase === "ready" || engine.phase === "loading") && engine.model.id === model.id) {
      this.local?.dispose();
      this.local = null;
      this.store.set({ engine: { phase: "idle" } });
    }
    await removeModel(model, this.base, caches);
    await this.refreshStorage();
    this.store.set({ announcement: `${model.name} was removed from this browser.` });
  }

  /** Removes every stored model but the selected one. */
  async removeOthers(): Promise<void> {
    const { models, selected_id } = this.store.state;
    for (const model of models) {
      if (model.id !== selected_id) await removeModel(model, this.base, caches);
    }
    await this.refreshStorage();
  }

  async refreshStorage(): Promise<void> {
    const { models } = this.store.state;
    const stored: Record<string, number> = {};
    // On plain http the browser hides the caches, as it does WebGPU.
    if (!isSecureContext) return;
    for (const model of models) {
      const fit = this.fit(model);
      const library = fit.fits ? fit.library : model.libraries[0];
      if (library === undefined) continue;
      const files = placeFiles(model, library, this.base);
      stored[model.id] = await storedBytes(files, caches).catch(() => 0);
    }
    this.store.set({ stored_bytes: stored, storage: await inspectStorage() });
  }

  private follow(model: ModelRecord, engine: LocalEngine): (event: LoadEvent) => void {
    const meter = new RateMeter();
    return (event) => {
      if (this.local !== engine) return;
      const progress = ((): LoadProgress => {
        switch (event.kind) {
          case "waiting":
            return { step: "waiting" };
          case "prepare":
            return { step: "prepare", fraction: event.fraction };
          case "download": {
            const { done_bytes, total_bytes, kept_bytes } = event.progress;
            if (done_bytes === kept_bytes) return { step: "checking" };
            meter.add(done_bytes, performance.now() / 1000);
            const seconds_left = meter.secondsLeft(total_bytes - done_bytes);
            const { bytes_per_s } = meter;
            return { step: "download", done_bytes, total_bytes, bytes_per_s, seconds_left };
          }
        }
      })();
      this.store.set({ engine: { phase: "loading", model, progress } });
    };
  }

  private loadFailed(error: unknown, options: StartOptions): void {
    this.local?.dispose();
    this.local = null;
    this.store.set({ engine: { phase: "idle" } });
    if (!(error instanceof LoadError)) return; // the engine was lost: `restart` says so
    if (error.is_cancelled) {
      this.store.set({ announcement: "The download was stopped. What arrived is kept." });
      return;
    }
    if (error.download !== null) {
      const is_storage = error.download === "quota" || error.download === "storage";
      const { models } = this.store.state;
      const actions: NoticeAction[] = is_storage
        ? ["without_storing", ...(models.length > 1 ? (["remove_others"] as const) : [])]
        : ["retry"];
      this.fail(error.message, actions);
    } else if (!options.is_thorough && options.keep !== "memory") {
      // Whatever went wrong, stored files that were damaged later on can be the reason.
      void this.start({ ...options, is_thorough: true });
    } else {
      this.fail(`The model could not be started: ${error.message}`, ["retry"]);
    }
  }

  /** After the worker died, hung or lost the GPU: once more, and say so. */
  private async restart(engine: LocalEngine, why: string): Promise<void> {
    if (this.local !== engine) return;
    this.local = null;
    this.store.set({ engine: { phase: "idle" } });
    const now_ms = performance.now();
    if (now_ms - this.last_restart_ms < RESTART_PAUSE_MS) {
      this.fail(`${why} It happened twice in a minute; a smaller model may fit better.`, ["retry"]);
      return;
    }
    this.last_restart_ms = now_ms;
    await this.start({ ...this.last_options, is_thorough: false });
    if (this.store.state.engine.phase === "ready") {
      this.store.set({
        notice: { kind: "info", text: `${why} It was started again.`, actions: [] },
      });
    }
  }

  private fail(text: string, actions: readonly NoticeAction[] = []): void {
    this.store.set({ notice: { kind: "error", text, actions } });
  }
}

/** Asks the browser not to drop the model when space gets short. A refusal changes nothing. */
async function askToPersist(): Promise<void> {
  await navigator.storage.persist?.().catch(() => false);
}
