/** The engine worker: downloads, then stock WebLLM. All its work is off the page's thread. */

import {
  type ChatCompletionChunk,
  type ChatCompletionRequestStreaming,
  MLCEngine,
} from "@mlc-ai/web-llm";
import { DownloadError } from "../download/errors";
import { downloadFiles } from "../download/downloader";
import { type ChatOutcome, type ChatRequest, openAIRequest } from "./backend";
import { cachesWithMemory } from "./memory_caches";
import type { FromWorker, LoadRequest, ToWorker, WorkerFault } from "./protocol";

const scope = self as unknown as DedicatedWorkerGlobalScope;
const browserCaches = scope.caches;

let engine: MLCEngine | null = null;
let loading = new AbortController();
let is_stopped = false;

function send(message: FromWorker): void {
  scope.postMessage(message);
}

scope.addEventListener("message", (event: MessageEvent<ToWorker>) => {
  const message = event.data;
  switch (message.kind) {
    case "start":
      holdLock(message.lock);
      break;
    case "load":
      void load(message.request);
      break;
    case "cancel_load":
      loading.abort(new DOMException("cancelled", "AbortError"));
      break;
    case "chat":
      void chat(message.id, message.request);
      break;
    case "stop":
      is_stopped = true;
      engine?.interruptGenerate();
      break;
  }
});

/** The page waits for the same lock: it gets it the moment this worker is gone, however it ended. */
function holdLock(name: string): void {
  void navigator.locks.request(name, () => {
    send({ kind: "started" });
    return new Promise<never>(() => {});
  });
}

async function load(request: LoadRequest): Promise<void> {
  loading = new AbortController();
  const { signal } = loading;
  try {
    const in_memory = await bringFiles(request, signal);
    if (request.keep === "memory") {
      const caches = cachesWithMemory(in_memory, browserCaches);
      Object.defineProperty(scope, "caches", { value: caches, configurable: true });
    }
    watchDevice();
    engine = new MLCEngine({
      appConfig: {
        cacheBackend: "cache",
        model_list: [
          {
            model_id: request.model_id,
            model: request.model_url,
            model_lib: request.library_url,
            required_features: [...request.features],
            overrides: { context_window_size: request.context_window_size },
          },
        ],
      },
      initProgressCallback: (report) => send({ kind: "prepare", fraction: report.progress }),
      logLevel: "WARN",
    });
    send({ kind: "prepare", fraction: 0 });
    await engine.reload(request.model_id);
    signal.throwIfAborted();
    send({ kind: "loaded" });
  } catch (error) {
    engine = null;
    send({ kind: "load_failed", fault: faultOf(error) });
  }
}

/** One download of a model at a time: a second tab waits, and then finds the files. */
async function bringFiles(
  request: LoadRequest,
  signal: AbortSignal,
): Promise<ReadonlyMap<string, ArrayBuffer>> {
  const download = (): Promise<ReadonlyMap<string, ArrayBuffer>> =>
    downloadFiles(request.files, {
      storage: browserCaches,
      keep: request.keep,
      signal,
      isThorough: request.is_thorough,
      onProgress: (progress) => send({ kind: "download", progress }),
    });
  if (request.keep === "memory") return download();
  const name = `everycast-download ${request.model_url}`;
  const held = await navigator.locks.query();
  if (held.held?.some((lock) => lock.name === name)) send({ kind: "waiting" });
  return navigator.locks.request(name, { signal }, download);
}

/** Tells the page when the GPU goes away. WebLLM unloads itself then, and says nothing. */
function watchDevice(): void {
  const adapter = GPUAdapter.prototype;
  const requestDevice = adapter.requestDevice;
  adapter.requestDevice = async function (this: GPUAdapter, descriptor) {
    const device = await requestDevice.call(this, descriptor);
    void device.lost.then((info) => {
      send({ kind: "device_lost", message: info.message || info.reason });
    });
    return device;
  };
}

async function chat(id: number, request: ChatRequest): Promise<void> {
  try {
    if (engine === null) throw new Error("the model is not loaded");
    is_stopped = false;
    const stream = (await engine.chat.completions.create(
      engineRequest(request),
    )) as AsyncIterable<ChatCompletionChunk>;
    send({ kind: "answered", id, outcome: await forward(id, stream) });
  } catch (error) {
    send({ kind: "chat_failed", id, fault: faultOf(error) });
  }
}

/** WebLLM 0.2.86 compiles a schema for `json_object` whether or not there is one: it gets one. */
function engineRequest(request: ChatRequest): ChatCompletionRequestStreaming {
  const asked = openAIRequest(request) as unknown as ChatCompletionRequestStreaming;
  const schema = JSON.stringify({ type: "object", additionalProperties: true });
  return request.sampling.is_json_mode
    ? { ...asked, response_format: { type: "json_object", schema } }
    : asked;
}

async function forward(
  id: number,
  stream: AsyncIterable<ChatCompletionChunk>,
): Promise<ChatOutcome> {
  const start_ms = performance.now();
  let first_ms: number | null = null;
  let finish_reason: ChatOutcome["finish_reason"] = "stop";
  let usage: ChatCompletionChunk["usage"];
  for await (const chunk of stream) {
    // A stop that came during the prefill is forgotten by the engine when decoding begins.
    if (is_stopped) engine?.interruptGenerate();
    const [choice] = chunk.choices;
    if (choice?.delta.content) {
      first_ms ??= performance.now();
      send({ kind: "text", id, delta: choice.delta.content });
    }
    if (choice?.finish_reason === "length") finish_reason = "length";
    usage = chunk.usage ?? usage;
  }
  return {
    finish_reason: is_stopped ? "interrupted" : finish_reason,
    num_prompt_tokens: usage?.prompt_tokens ?? null,
    num_completion_tokens: usage?.completion_tokens ?? null,
    decode_tokens_per_s: usage?.extra?.decode_tokens_per_s ?? null,
    time_to_first_token_s: first_ms === null ? null : (first_ms - start_ms) / 1000,
  };
}

function faultOf(error: unknown): WorkerFault {
  return {
    message: error instanceof Error ? error.message : String(error),
    download: error instanceof DownloadError ? error.kind : null,
    is_cancelled: error instanceof DOMException && error.name === "AbortError",
  };
}
