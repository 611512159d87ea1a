/** Messages between the page and its engine worker. */

import type { DownloadErrorKind } from "../download/errors";
import type { DownloadProgress } from "../download/downloader";
import type { PlacedFile } from "../download/model_cache";
import type { ChatOutcome, ChatRequest } from "./backend";

export interface LoadRequest {
  readonly model_id: string;
  readonly model_url: string;
  readonly library_url: string;
  readonly features: readonly string[];
  readonly files: readonly PlacedFile[];
  readonly context_window_size: number;
  readonly keep: "cache" | "memory";
  /** Hash every stored file before it is used. */
  readonly is_thorough: boolean;
}

export type ToWorker =
  | { readonly kind: "start"; readonly lock: string }
  | { readonly kind: "load"; readonly request: LoadRequest }
  | { readonly kind: "cancel_load" }
  | { readonly kind: "chat"; readonly id: number; readonly request: ChatRequest }
  | { readonly kind: "stop" };

export interface WorkerFault {
  readonly message: string;
  /** Set if the download was at fault. */
  readonly download: DownloadErrorKind | null;
  readonly is_cancelled: boolean;
}

export type FromWorker =
  | { readonly kind: "started" }
  | { readonly kind: "waiting" } // another tab downloads the same model
  | { readonly kind: "download"; readonly progress: DownloadProgress }
  | { readonly kind: "prepare"; readonly fraction: number } // onto the GPU
  | { readonly kind: "loaded" }
  | { readonly kind: "load_failed"; readonly fault: WorkerFault }
  | { readonly kind: "text"; readonly id: number; readonly delta: string }
  | { readonly kind: "answered"; readonly id: number; readonly outcome: ChatOutcome }
  | { readonly kind: "chat_failed"; readonly id: number; readonly fault: WorkerFault }
  | { readonly kind: "device_lost"; readonly message: string };
