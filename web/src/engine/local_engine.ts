/** The engine worker as the page sees it: one model, one answer at a time, and an honest end.
 *
 * A worker can vanish (out of memory, a crash), hang, or lose the GPU. `onEnd` is called once for
 * each of these, and everything that was waiting is rejected with EngineLost; the page then starts
 * another engine.
 */

import type { DownloadErrorKind } from "../download/errors";
import type { DownloadProgress } from "../download/downloader";
import type { Backend, ChatOutcome, ChatRequest } from "./backend";
import type { FromWorker, LoadRequest, ToWorker, WorkerFault } from "./protocol";

/** How long the engine may take to stop before it counts as hung. It only looks up between
 * tokens, and the reading of a long question is one step. */
const STOP_TIMEOUT_MS = { answering: 15_000, reading: 60_000 } as const;

export class EngineLost extends Error {
  override readonly name = "EngineLost";
}

export class LoadError extends Error {
  override readonly name = "LoadError";

  constructor(
    message: string,
    readonly download: DownloadErrorKind | null,
    readonly is_cancelled: boolean,
  ) {
    super(message);
  }
}

export type LoadEvent =
  | { readonly kind: "waiting" }
  | { readonly kind: "download"; readonly progress: DownloadProgress }
  | { readonly kind: "prepare"; readonly fraction: number };

interface PendingLoad {
  readonly resolve: () => void;
  readonly reject: (error: Error) => void;
  readonly onEvent: (event: LoadEvent) => void;
}

interface PendingChat {
  readonly id: number;
  readonly resolve: (outcome: ChatOutcome) => void;
  readonly reject: (error: Error) => void;
  readonly onText: (delta: string) => void;
}

export class LocalEngine implements Backend {
  private readonly lock = `everycast-engine ${crypto.randomUUID()}`;
  private readonly watching = new AbortController();
  private pending_load: PendingLoad | null = null;
  private pending_chat: PendingChat | null = null;
  private next_id = 1;
  private has_ended = false;

  constructor(
    private readonly worker: Worker,
    private readonly onEnd: (why: string) => void,
  ) {
    worker.addEventListener("message", (event: MessageEvent<FromWorker>) => {
      this.receive(event.data);
    });
    worker.addEventListener("error", (event) => {
      event.preventDefault();
      this.end(`The engine failed: ${event.message || "its program could not be loaded"}.`);
    });
    this.post({ kind: "start", lock: this.lock });
  }

  /** Downloads what is missing and puts the model on the GPU. Rejects with LoadError or EngineLost. */
  load(request: LoadRequest, onEvent: (event: LoadEvent) => void): Promise<void> {
    return new Promise((resolve, reject) => {
      this.pending_load = { resolve, reject, onEvent };
      this.post({ kind: "load", request });
    });
  }

  cancelLoad(): void {
    this.post({ kind: "cancel_load" });
  }

  chat(
    request: ChatRequest,
    onText: (delta: string) => void,
    signal: AbortSignal,
  ): Promise<ChatOutcome> {
    const id = this.next_id++;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let stage: keyof typeof STOP_TIMEOUT_MS = "reading";
    const onAbort = (): void => {
      this.post({ kind: "stop" });
      const giveUp = (): void => this.end("The engine did not stop when asked to.");
      timer = setTimeout(giveUp, STOP_TIMEOUT_MS[stage]);
    };
    return new Promise<ChatOutcome>((resolve, reject) => {
      if (this.has_ended) {
        reject(new EngineLost("The engine is gone."));
        return;
      }
      this.pending_chat = {
        id,
        resolve,
        reject,
        onText: (delta) => {
          stage = "answering";
          onText(delta);
        },
      };
      signal.addEventListener("abort", onAbort, { once: true });
      this.post({ kind: "chat", id, request });
    }).finally(() => {
      clearTimeout(timer);
      signal.removeEventListener("abort", onAbort);
      if (this.pending_chat?.id === id) this.pending_chat = null;
    });
  }

  /** Ends the worker without a word to `onEnd`. */
  dispose(): void {
    this.finish(new EngineLost("The engine was shut down."));
  }

  private post(message: ToWorker): void {
    this.worker.postMessage(message);
  }

  private receive(message: FromWorker): void {
    if (this.has_ended) return;
    const load = this.pending_load;
    const chat = this.pending_chat;
    switch (message.kind) {
      case "started":
        this.watchLock();
        break;
      case "waiting":
      case "download":
      case "prepare":
        load?.onEvent(message);
        break;
      case "loaded":
        this.pending_load = null;
        load?.resolve();
        break;
      case "load_failed":
        this.pending_load = null;
        load?.reject(loadError(message.fault));
        break;
      case "text":
        if (chat?.id === message.id) chat.onText(message.delta);
        break;
      case "answered":
        if (chat?.id === message.id) chat.resolve(message.outcome);
        break;
      case "chat_failed":
        if (chat?.id === message.id) chat.reject(new Error(message.fault.message));
        break;
      case "device_lost":
        this.end(`The browser took the GPU away (${message.message}).`);
        break;
    }
  }

  /** The worker holds the lock as long as it lives: whoever gets it next knows it is dead. */
  private watchLock(): void {
    navigator.locks
      .request(this.lock, { signal: this.watching.signal }, () => {
        this.end("The engine's worker ended; the browser may have run out of memory.");
      })
      .catch(() => undefined); // disposed
  }

  private end(why: string): void {
    if (this.has_ended) return;
    this.finish(new EngineLost(why));
    this.onEnd(why);
  }

  private finish(error: EngineLost): void {
    if (this.has_ended) return;
    this.has_ended = true;
    this.watching.abort();
    this.worker.terminate();
    this.pending_load?.reject(error);
    this.pending_chat?.reject(error);
  }
}

function loadError(fault: WorkerFault): LoadError {
  return new LoadError(fault.message, fault.download, fault.is_cancelled);
}

/** A worker that runs `worker.ts`. */
export function startWorker(): Worker {
  return new Worker(new URL("./worker.ts", import.meta.url), { type: "module", name: "engine" });
}
