/** The state of the page. Only `controller.ts` changes it; the components draw it. */

import type { DeviceReport, StorageReport } from "./device";
import type { Conversation } from "./history/conversation";
import type { ModelRecord } from "./models";
import { loadSettings, type Settings } from "./settings";
import { Store } from "./store";

/** What answers, or what stands in the way. */
export type EngineState =
  | { readonly phase: "starting" } // looking at the host and the device
  | { readonly phase: "idle" } // nothing is loaded
  | { readonly phase: "loading"; readonly model: ModelRecord; readonly progress: LoadProgress }
  | { readonly phase: "ready"; readonly model: ModelRecord; readonly precision: "f16" | "f32" }
  | { readonly phase: "server"; readonly name: string };

export type LoadProgress =
  | { readonly step: "checking" }
  | { readonly step: "waiting" }
  | {
      readonly step: "download";
      readonly done_bytes: number;
      readonly total_bytes: number;
      readonly bytes_per_s: number | null;
      readonly seconds_left: number | null;
    }
  | { readonly step: "prepare"; readonly fraction: number };

export interface Notice {
  readonly kind: "error" | "info";
  readonly text: string;
  /** What one can do about it, in the order of the buttons. */
  readonly actions: readonly NoticeAction[];
}

export type NoticeAction = "retry" | "without_storing" | "remove_others";

/** The answer that is being written. */
export interface Answering {
  readonly conversation_id: string;
  readonly message_id: string;
  readonly text: string;
  readonly is_stopping: boolean;
}

export interface AppState {
  readonly models: readonly ModelRecord[];
  readonly device: DeviceReport | null;
  readonly storage: StorageReport;
  /** The model that this origin's server answers with, if there is one. */
  readonly server_name: string | null;
  readonly selected_id: string | null;
  /** Bytes of each model that are stored in this browser, by model id. */
  readonly stored_bytes: Readonly<Record<string, number>>;
  readonly engine: EngineState;
  readonly notice: Notice | null;
  readonly is_history_kept: boolean;
  readonly conversations: readonly Conversation[];
  readonly conversation: Conversation;
  readonly answering: Answering | null;
  readonly settings: Settings;
  /** Read out by screen readers. */
  readonly announcement: string;
}

export function createState(conversation: Conversation): Store<AppState> {
  return new Store<AppState>({
    models: [],
    device: null,
    storage: { num_free_bytes: null },
    server_name: null,
    selected_id: null,
    stored_bytes: {},
    engine: { phase: "starting" },
    notice: null,
    is_history_kept: true,
    conversations: [],
    conversation,
    answering: null,
    settings: loadSettings(),
    announcement: "",
  });
}
