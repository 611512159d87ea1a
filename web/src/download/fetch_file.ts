/** One file over an unreliable network: resumed by ranges, checked by size and hash. */

import { cutError, hashError, htmlError, missingError, serverError, sizeError } from "./errors";
import { type PlacedFile, sha256 } from "./model_cache";
import { PartialStore } from "./partial_store";

const MAX_FRUITLESS_ATTEMPTS = 5;
const FIRST_DELAY_MS = 500;
/** What is lost at most when the page is closed during a download. */
const PIECE_BYTES = 4 * 2 ** 20;
const MAX_STALL_MS = 30_000;

export interface FetchEnvironment {
  readonly fetch: typeof fetch;
  readonly partials: PartialStore;
  readonly sleep: (ms: number, signal: AbortSignal) => Promise<void>;
  readonly signal: AbortSignal;
  /** Called with the bytes of this file that are there; it falls when some turn out bad. */
  readonly onBytes: (num_bytes: number) => void;
}

type Attempt =
  | { readonly outcome: "whole"; readonly data: ArrayBuffer }
  | { readonly outcome: "cut"; readonly num_bytes: number; readonly has_progressed: boolean }
  | { readonly outcome: "server"; readonly status: number };

/** The file's bytes, once they are what `file` says. Throws DownloadError, or the signal's reason. */
export async function fetchFile(
  file: PlacedFile,
  environment: FetchEnvironment,
): Promise<ArrayBuffer> {
  const { partials, sleep, signal, onBytes } = environment;
  let num_fruitless = 0;
  let has_mismatched = false;
  for (;;) {
    const attempt = await fetchOnce(file, environment);
    signal.throwIfAborted();
    if (attempt.outcome === "whole") {
      if ((await sha256(attempt.data)) === file.sha256) {
        return attempt.data;
      }
      await partials.remove(file.url);
      onBytes(0);
      // Joined pieces may be to blame: once more, from the start.
      if (has_mismatched) throw hashError(file.url);
      has_mismatched = true;
      continue;
    }
    num_fruitless = attempt.outcome === "cut" && attempt.has_progressed ? 0 : num_fruitless + 1;
    if (num_fruitless >= MAX_FRUITLESS_ATTEMPTS) {
      throw attempt.outcome === "cut"
        ? cutError(file.url, attempt.num_bytes, file.num_bytes)
        : serverError(file.url, attempt.status);
    }
    await sleep(FIRST_DELAY_MS * 2 ** num_fruitless, signal);
  }
}

async function fetchOnce(file: PlacedFile, environment: FetchEnvironment): Promise<Attempt> {
  const { partials, signal, onBytes } = environment;
  const data = new Uint8Array(file.num_bytes);
  const partial = await partials.read(file.url, data);
  const kept = partial.num_bytes;
  onBytes(kept);
  if (kept === file.num_bytes) return { outcome: "whole", data: data.buffer };
  const headers: Record<string, string> =
    partial.etag === null ? {} : { Range: `bytes=${kept}-`, "If-Range": partial.etag };
  const stall = new Stall(signal);
  try {
    let response: Response;
    try {
      // The HTTP cache would only keep a second copy.
      response = await environment.fetch(file.url, {
        headers,
        cache: "no-store",
        signal: stall.signal,
      });
    } catch {
      signal.throwIfAborted();
      return { outcome: "cut", num_bytes: kept, has_progressed: false };
    }
    const start = await startOf(response, file, kept, partials);
    if (typeof start !== "number") return start;
    return await readBody(response, file, data, start, environment, stall);
  } finally {
    stall.stop();
  }
}

/** Where the response's body begins in the file, or how the attempt ended. */
async function startOf(
  response: Response,
  file: PlacedFile,
  kept: number,
  partials: PartialStore,
): Promise<number | Attempt> {
  const { status } = response;
  if (status === 416) {
    await partials.remove(file.url);
    return { outcome: "cut", num_bytes: 0, has_progressed: false };
  }
  if (status === 429 || status >= 500) return { outcome: "server", status };
  if (!response.ok) throw missingError(file.url, status);
  if (response.headers.get("content-type")?.includes("text/html")) throw htmlError(file.url);
  if (status === 206) {
    const range = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get("content-range") ?? "");
    const total = Number(range?.[2]);
    if (Number.isFinite(total) && total !== file.num_bytes) {
      await partials.remove(file.url);
      throw sizeError(file.url, file.num_bytes, total);
    }
    if (Number(range?.[1]) === kept) return kept;
    await partials.remove(file.url);
    return { outcome: "cut", num_bytes: 0, has_progressed: false };
  }
  if (kept > 0) await partials.remove(file.url);
  const length = response.headers.get("content-length");
  const is_encoded = response.headers.has("content-encoding");
  if (length !== null && !is_encoded && Number(length) !== file.num_bytes) {
    throw sizeError(file.url, file.num_bytes, Number(length));
  }
  return 0;
}

/** Fills `data` from `start` on. */
async function readBody(
  response: Response,
  file: PlacedFile,
  data: Uint8Array<ArrayBuffer>,
  start: number,
  environment: FetchEnvironment,
  stall: Stall,
): Promise<Attempt> {
  const { partials, signal, onBytes } = environment;
  // A weak entity tag promises nothing about bytes: such a file cannot be resumed.
  const tag = response.headers.get("etag");
  const etag = tag?.startsWith('"') ? tag : null;
  let end = start;
  let saved_end = start;
  const save = async (): Promise<void> => {
    if (etag === null || saved_end === end) return;
    await partials.append(file.url, etag, saved_end, data.subarray(saved_end, end));
    saved_end = end;
  };
  const reader = response.body?.getReader();
  let is_broken = reader === undefined;
  while (reader !== undefined) {
    let chunk: ReadableStreamReadResult<Uint8Array>;
    try {
      chunk = await reader.read();
    } catch {
      is_broken = true;
      break;
    }
    if (chunk.done) break;
    stall.restart();
    if (end + chunk.value.length > file.num_bytes) {
      await reader.cancel();
      await partials.remove(file.url);
      throw sizeError(file.url, file.num_bytes, end + chunk.value.length);
    }
    data.set(chunk.value, end);
    end += chunk.value.length;
    onBytes(end);
    if (end - saved_end >= PIECE_BYTES && end < file.num_bytes) await save();
  }
  if (!is_broken && end === file.num_bytes) return { outcome: "whole", data: data.buffer };
  await save();
  signal.throwIfAborted();
  const has_progressed = etag !== null && end > start;
  return { outcome: "cut", num_bytes: etag === null ? 0 : end, has_progressed };
}

/** Aborts a request that brings nothing for a while: a dead connection may never say so. */
class Stall {
  private readonly controller = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly onAbort = (): void => this.controller.abort();

  constructor(private readonly outer: AbortSignal) {
    outer.addEventListener("abort", this.onAbort);
    if (outer.aborted) this.controller.abort();
    this.restart();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  restart(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(this.onAbort, MAX_STALL_MS);
  }

  stop(): void {
    clearTimeout(this.timer);
    this.outer.removeEventListener("abort", this.onAbort);
  }
}
