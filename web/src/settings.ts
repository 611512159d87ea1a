/** What the person set, kept in this browser. */

import type { SamplingSettings } from "./engine/backend";
import type { SamplingAdvice } from "./models";

export type Theme = "system" | "light" | "dark";

export interface Settings {
  readonly system_prompt: string;
  readonly sampling: SamplingSettings;
  /** Most tokens of a conversation; the GPU's memory for them is taken when the model starts. */
  readonly context_window_size: number;
  readonly theme: Theme;
  readonly model_id: string | null;
}

export const DEFAULT_SETTINGS: Settings = {
  system_prompt: "",
  sampling: {
    temperature: null,
    top_p: null,
    max_tokens: null,
    frequency_penalty: null,
    presence_penalty: null,
    seed: null,
    is_json_mode: false,
  },
  context_window_size: 4096,
  theme: "system",
  model_id: null,
};

/** For models whose makers advise nothing: livelier than the likeliest words, and still to the
 * point in small models. */
const HOUSE_ADVICE = { temperature: 0.6, top_p: 0.9 } as const;

/** The values that empty fields stand for. */
export function advised(advice: SamplingAdvice | undefined): Required<SamplingAdvice> {
  return { ...HOUSE_ADVICE, ...advice };
}

const KEY = "everycast-settings";

export function loadSettings(): Settings {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Settings>;
    return {
      ...DEFAULT_SETTINGS,
      ...stored,
      sampling: { ...DEFAULT_SETTINGS.sampling, ...stored.sampling },
    };
  } catch {
    return DEFAULT_SETTINGS;
  }
}

export function saveSettings(settings: Settings): void {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings));
  } catch {
    // A browser that keeps nothing: they hold until the page is closed.
  }
}

export function applyTheme(theme: Theme): void {
  if (theme === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
}
