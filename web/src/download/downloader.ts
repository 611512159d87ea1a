/** A model's files, from the network into the caches that WebLLM reads (or into memory). */

import { storageError } from "./errors";
import { fetchFile } from "./fetch_file";
import { CHECKED_HEADER, isStored, type PlacedFile } from "./model_cache";
import { PartialStore } from "./partial_store";

const NUM_PARALLEL = 3;

export interface DownloadProgress {
  readonly done_bytes: number;
  readonly total_bytes: number;
  /** Of `done_bytes`, what was there before. */
  readonly kept_bytes: number;
}

export interface DownloadOptions {
  readonly storage: CacheStorage;
  /** `memory`: store nothing, for when the browser has no space. */
  readonly keep: "cache" | "memory";
  readonly signal: AbortSignal;
  readonly onProgress: (progress: DownloadProgress) => void;
  /** Hash what is stored already, instead of believing the mark that it was hashed. */
  readonly isThorough?: boolean;
  readonly fetch?: typeof fetch;
  readonly sleep?: (ms: number, signal: AbortSignal) => Promise<void>;
}

/** Brings what is missing. Gives the bytes that were not stored, by URL (`memory` only).
 *
 * Throws DownloadError, or the signal's reason; what arrived whole by then is stored. */
export async function downloadFiles(
  files: readonly PlacedFile[],
  options: DownloadOptions,
): Promise<ReadonlyMap<string, ArrayBuffer>> {
  const { storage, keep, signal, onProgress } = options;
  const in_memory = new Map<string, ArrayBuffer>();
  const done = new Map<string, number>();
  const total_bytes = files.reduce((sum, file) => sum + file.num_bytes, 0);
  let kept_bytes = 0;
  const report = (): void => {
    const done_bytes = [...done.values()].reduce((sum, bytes) => sum + bytes, 0);
    onProgress({ done_bytes, total_bytes, kept_bytes });
  };

  const missing: PlacedFile[] = [];
  for (const file of files) {
    signal.throwIfAborted();
    const is_stored = await isStored(file, storage, options.isThorough).catch(() => false);
    if (is_stored) {
      done.set(file.url, file.num_bytes);
      kept_bytes += file.num_bytes;
      report();
    } else {
      missing.push(file);
    }
  }

  // When one file fails for good, the others stop too.
  const stopping = new AbortController();
  const stopped = stopping.signal;
  const onAbort = (): void => stopping.abort(signal.reason);
  signal.addEventListener("abort", onAbort);
  const partials = new PartialStore(storage);
  const bring = async (file: PlacedFile): Promise<void> => {
    let is_first = true;
    const data = await fetchFile(file, {
      fetch: options.fetch ?? ((...request) => fetch(...request)),
      sleep: options.sleep ?? sleep,
      partials,
      signal: stopped,
      onBytes: (num_bytes) => {
        if (is_first) kept_bytes += num_bytes;
        is_first = false;
        done.set(file.url, num_bytes);
        report();
      },
    });
    if (keep === "memory") {
      in_memory.set(file.url, data);
    } else {
      await store(file, data, storage);
    }
    await partials.remove(file.url);
  };
  const worker = async (): Promise<void> => {
    for (let file = missing.shift(); file !== undefined; file = missing.shift()) {
      try {
        await bring(file);
      } catch (error) {
        stopping.abort(error); // of several calls, the first one's reason holds
        throw error;
      }
    }
  };
  await Promise.allSettled(Array.from({ length: NUM_PARALLEL }, worker));
  signal.removeEventListener("abort", onAbort);
  stopped.throwIfAborted();
  report();
  return in_memory;
}

async function store(file: PlacedFile, data: ArrayBuffer, storage: CacheStorage): Promise<void> {
  const headers = {
    "content-type": contentType(file.url),
    "content-length": String(file.num_bytes),
    [CHECKED_HEADER]: file.sha256,
  };
  try {
    const cache = await storage.open(file.scope);
    await cache.put(file.url, new Response(data, { headers }));
  } catch (error) {
    throw storageError(error);
  }
}

function contentType(url: string): string {
  if (url.endsWith(".json")) return "application/json";
  return url.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
}

function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const onAbort = (): void => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal.addEventListener("abort", onAbort, { once: true });
  });
}
