import type { AppState } from "../app_state";
import type { DeviceReport } from "../device";
import { formatBytes, formatParameters } from "../format";
import type { ModelController } from "../model_controller";
import type { ModelRecord } from "../models";
import { Icon } from "./icons";
import { LoadView } from "./load_view";

interface PanelProps {
  readonly state: AppState;
  readonly models: ModelController;
}

/** Which model, what it would take, whether it can run here; nothing is downloaded before a click. */
export function ModelPanel({ state, models }: PanelProps) {
  const { engine } = state;
  if (engine.phase === "starting") return <p class="hint center">Looking at this device…</p>;
  if (engine.phase === "loading") {
    return <LoadView engine={engine} onCancel={() => models.cancel()} />;
  }
  const selected = state.models.find((model) => model.id === state.selected_id);
  return (
    <div class="model-panel">
      {state.models.length > 0 && (
        <fieldset class="model-list">
          <legend>Model</legend>
          {state.models.map((model) => (
            <ModelChoice
              key={model.id}
              model={model}
              is_selected={model.id === state.selected_id}
              onSelect={() => models.select(model.id)}
            />
          ))}
        </fieldset>
      )}
      {selected !== undefined && <Facts state={state} model={selected} models={models} />}
      {state.server_name !== null && engine.phase !== "server" && (
        <p class="server-offer">
          <button type="button" class="button" onClick={() => models.useServer()}>
            Use this host’s server instead
          </button>
          <span class="hint">
            {state.server_name} then runs there, and what you write is sent to it.
          </span>
        </p>
      )}
    </div>
  );
}

interface ChoiceProps {
  readonly model: ModelRecord;
  readonly is_selected: boolean;
  readonly onSelect: () => void;
}

function ModelChoice({ model, is_selected, onSelect }: ChoiceProps) {
  const facts = [
    `${formatParameters(model.num_parameters)} parameters`,
    model.quantization === "gguf"
      ? `${model.bits_per_weight.toFixed(1)}\u00a0bits per weight`
      : model.quantization,
    model.licence,
  ];
  return (
    <label class="model-choice">
      <input type="radio" name="model" value={model.id} checked={is_selected} onChange={onSelect} />
      <span>
        <strong>{model.name}</strong>
        <small>
          {facts.filter(Boolean).map((fact, index) => (
            <span key={fact}>
              {index > 0 && " · "}
              <span class="unbroken">{fact}</span>
            </span>
          ))}
        </small>
      </span>
    </label>
  );
}

function Facts({ state, model, models }: PanelProps & { readonly model: ModelRecord }) {
  const fit = models.fit(model);
  const needed = models.neededBytes(model);
  const stored = state.stored_bytes[model.id] ?? 0;
  const missing = needed - stored;
  const free = state.storage.num_free_bytes;
  const has_space = free === null || missing <= free;
  const is_running = state.engine.phase === "ready" && state.engine.model.id === model.id;
  return (
    <>
      <dl class="facts">
        <div>
          <dt>Download</dt>
          <dd>
            {missing === 0
              ? `Nothing: ${formatBytes(needed)} are stored in this browser.`
              : stored === 0
                ? `${formatBytes(needed)} in ${model.files.length + 1} files, once.`
                : `${formatBytes(missing)} of ${formatBytes(needed)}; the rest is stored here.`}
          </dd>
        </div>
        <div>
          <dt>This device</dt>
          <dd>
            <DeviceView device={state.device} />
            {fit.fits ? (
              <Verdict is_good>
                {fit.library.features.includes("shader-f16")
                  ? "It can run the model: the f16 build."
                  : "It can run the model: the f32 build."}
              </Verdict>
            ) : (
              <Verdict is_good={false}>
                {fit.reason}
                {state.device?.status === "unavailable" && ` ${state.device.advice}`}
                {state.server_name === null &&
                  " A server can compute instead: everycast web --with-server."}
              </Verdict>
            )}
          </dd>
        </div>
        <div>
          <dt>Storage</dt>
          <dd>
            {free === null
              ? "The browser does not say how much it would store."
              : `The browser lets this site store ${formatBytes(free)} more.`}
            {!has_space && (
              <Verdict is_good={false}>
                That is too little. Free space, or run the model without storing it.
              </Verdict>
            )}
          </dd>
        </div>
      </dl>
      <div class="row actions">
        {fit.fits && !is_running && (
          <button type="button" class="button primary" onClick={() => void models.start()}>
            {missing === 0 ? (
              "Start"
            ) : (
              <>
                <Icon name="download" />
                {stored === 0 ? `Download ${formatBytes(missing)} and start` : "Go on and start"}
              </>
            )}
          </button>
        )}
        {fit.fits && !is_running && !has_space && (
          <button
            type="button"
            class="button"
            onClick={() => void models.start({ keep: "memory" })}
          >
            Run without storing
          </button>
        )}
        {stored > 0 && (
          <>
            <button type="button" class="button quiet" onClick={() => void models.check()}>
              Check stored files
            </button>
            <button type="button" class="button quiet" onClick={() => void models.remove(model)}>
              <Icon name="trash" /> Remove {formatBytes(stored)}
            </button>
          </>
        )}
      </div>
    </>
  );
}

function DeviceView({ device }: { readonly device: DeviceReport | null }) {
  if (device?.status !== "available") return null;
  return (
    <span>
      {device.description}
      {device.is_cpu_adapter && ", which computes on the CPU: expect it to be slow"}.
    </span>
  );
}

function Verdict({ is_good, children }: { is_good: boolean; children: preact.ComponentChildren }) {
  return (
    <span class={is_good ? "verdict good" : "verdict bad"}>
      <Icon name={is_good ? "check" : "close"} />
      <span>{children}</span>
    </span>
  );
}
