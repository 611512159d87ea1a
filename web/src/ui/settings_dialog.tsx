import { useEffect, useRef } from "preact/hooks";
import type { AppState } from "../app_state";
import type { SamplingSettings } from "../engine/backend";
import {
  advised,
  applyTheme,
  DEFAULT_SETTINGS,
  saveSettings,
  type Settings,
  type Theme,
} from "../settings";
import type { Store } from "../store";
import { IconButton } from "./icons";

interface DialogProps {
  readonly title: string;
  readonly onClose: () => void;
  readonly children: preact.ComponentChildren;
}

/** A modal dialog; Escape and a click beside it close it. */
export function Dialog({ title, onClose, children }: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog
      ref={dialog}
      aria-labelledby="dialog-title"
      onClose={onClose}
      onClick={(event) => {
        if (event.target === dialog.current) dialog.current?.close();
      }}
    >
      <div class="dialog-body">
        <header class="dialog-head">
          <h2 id="dialog-title">{title}</h2>
          <IconButton icon="close" label="Close" onClick={() => dialog.current?.close()} />
        </header>
        {children}
      </div>
    </dialog>
  );
}

interface SettingsProps {
  readonly store: Store<AppState>;
  readonly onDeleteHistory: () => void;
  readonly onClose: () => void;
}

export function SettingsDialog({ store, onDeleteHistory, onClose }: SettingsProps) {
  const { settings, models, selected_id } = store.state;
  const advice = advised(models.find((model) => model.id === selected_id)?.sampling);
  const change = (patch: Partial<Settings>): void => {
    store.set({ settings: { ...store.state.settings, ...patch } });
    saveSettings(store.state.settings);
  };
  const sample = (patch: Partial<SamplingSettings>): void =>
    change({ sampling: { ...store.state.settings.sampling, ...patch } });
  const { sampling } = settings;
  return (
    <Dialog title="Settings" onClose={onClose}>
      <section class="settings">
        <h3>Appearance</h3>
        <label class="field">
          <span>Colours</span>
          <select
            value={settings.theme}
            onChange={(event) => {
              const theme = event.currentTarget.value as Theme;
              change({ theme });
              applyTheme(theme);
            }}
          >
            <option value="system">As the device</option>
            <option value="light">Light</option>
            <option value="dark">Dark</option>
          </select>
        </label>
        <h3>Instructions</h3>
        <label class="field wide">
          <span>System prompt</span>
          <textarea
            rows={3}
            placeholder="You are a helpful assistant."
            value={settings.system_prompt}
            onInput={(event) => change({ system_prompt: event.currentTarget.value })}
          />
        </label>
        <h3>Sampling</h3>
        <p class="hint">An empty field takes the value shown in grey.</p>
        <NumberField
          label="Temperature"
          hint="0 always answers the same"
          value={sampling.temperature}
          placeholder={advice.temperature}
          min={0}
          max={2}
          step={0.05}
          onChange={(temperature) => sample({ temperature })}
        />
        <NumberField
          label="Top p"
          hint="share of the likeliest tokens"
          value={sampling.top_p}
          placeholder={advice.top_p}
          min={0.01}
          max={1}
          step={0.01}
          onChange={(top_p) => sample({ top_p })}
        />
        <NumberField
          label="Most tokens of an answer"
          value={sampling.max_tokens}
          min={1}
          max={100000}
          step={1}
          onChange={(max_tokens) => sample({ max_tokens })}
        />
        <NumberField
          label="Frequency penalty"
          value={sampling.frequency_penalty}
          min={-2}
          max={2}
          step={0.1}
          onChange={(frequency_penalty) => sample({ frequency_penalty })}
        />
        <NumberField
          label="Presence penalty"
          value={sampling.presence_penalty}
          min={-2}
          max={2}
          step={0.1}
          onChange={(presence_penalty) => sample({ presence_penalty })}
        />
        <NumberField
          label="Seed"
          hint="makes a random answer repeatable"
          value={sampling.seed}
          min={0}
          max={2 ** 31 - 1}
          step={1}
          onChange={(seed) => sample({ seed })}
        />
        <label class="field">
          <span>
            JSON mode<small>answers are one JSON object</small>
          </span>
          <input
            type="checkbox"
            checked={sampling.is_json_mode}
            onChange={(event) => sample({ is_json_mode: event.currentTarget.checked })}
          />
        </label>
        <h3>Memory</h3>
        <NumberField
          label="Context window"
          hint="tokens; counts at the next start of the model"
          value={settings.context_window_size}
          min={256}
          max={131072}
          step={256}
          onChange={(size) =>
            change({ context_window_size: size ?? DEFAULT_SETTINGS.context_window_size })
          }
        />
        <div class="row spread">
          <button type="button" class="button quiet" onClick={() => reset(store)}>
            Back to the defaults
          </button>
          <button
            type="button"
            class="button quiet danger"
            onClick={() => {
              if (confirm("Delete all conversations in this browser?")) onDeleteHistory();
            }}
          >
            Delete all conversations
          </button>
        </div>
      </section>
    </Dialog>
  );
}

function reset(store: Store<AppState>): void {
  const { model_id } = store.state.settings;
  store.set({ settings: { ...DEFAULT_SETTINGS, model_id } });
  saveSettings(store.state.settings);
  applyTheme(DEFAULT_SETTINGS.theme);
}

interface NumberProps {
  readonly label: string;
  readonly hint?: string;
  readonly value: number | null;
  readonly placeholder?: number | undefined;
  readonly min: number;
  readonly max: number;
  readonly step: number;
  readonly onChange: (value: number | null) => void;
}

function NumberField({ label, hint, value, placeholder, onChange, ...limits }: NumberProps) {
  return (
    <label class="field">
      <span>
        {label}
        {hint !== undefined && <small>{hint}</small>}
      </span>
      <input
        type="number"
        inputMode="decimal"
        value={value ?? ""}
        placeholder={placeholder === undefined ? "default" : String(placeholder)}
        {...limits}
        onChange={(event) => {
          const field = event.currentTarget;
          const number = field.valueAsNumber;
          if (Number.isNaN(number)) onChange(null);
          else onChange(Math.min(limits.max, Math.max(limits.min, number)));
        }}
      />
    </label>
  );
}
