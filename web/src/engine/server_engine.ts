/** The OpenAI-compatible server of this origin (`everycast serve`), for browsers without WebGPU. */

import { type Backend, type ChatOutcome, type ChatRequest, openAIRequest } from "./backend";

interface Chunk {
  readonly choices?: readonly {
    readonly delta?: { readonly content?: string | null };
    readonly finish_reason?: string | null;
  }[];
  readonly usage?: { readonly prompt_tokens: number; readonly completion_tokens: number } | null;
  readonly error?: { readonly message?: string };
}

/** The server's model, or null if there is no such server. */
export async function findServer(base: string): Promise<string | null> {
  try {
    const response = await fetch(new URL("v1/models", base), { cache: "no-store" });
    if (!response.ok || !response.headers.get("content-type")?.includes("json")) return null;
    const list = (await response.json()) as { readonly data?: readonly { readonly id: string }[] };
    return list.data?.[0]?.id ?? null;
  } catch {
    return null;
  }
}

export class ServerEngine implements Backend {
  constructor(
    private readonly base: string,
    private readonly model: string,
  ) {}

  async chat(
    request: ChatRequest,
    onText: (delta: string) => void,
    signal: AbortSignal,
  ): Promise<ChatOutcome> {
    const start_ms = performance.now();
    let first_ms: number | null = null;
    let finish_reason: ChatOutcome["finish_reason"] = "stop";
    let usage: Chunk["usage"] = null;
    try {
      const response = await fetch(new URL("v1/chat/completions", this.base), {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ model: this.model, ...openAIRequest(request) }),
        signal,
      });
      if (!response.ok || response.body === null) throw await refusal(response);
      for await (const chunk of readEvents(response.body)) {
        if (chunk.error !== undefined) throw new Error(chunk.error.message ?? "the server failed");
        const [choice] = chunk.choices ?? [];
        if (choice?.delta?.content) {
          first_ms ??= performance.now();
          onText(choice.delta.content);
        }
        if (choice?.finish_reason === "length") finish_reason = "length";
        usage = chunk.usage ?? usage;
      }
    } catch (error) {
      if (!signal.aborted) throw error;
      finish_reason = "interrupted";
    }
    const decode_s = first_ms === null ? 0 : (performance.now() - first_ms) / 1000;
    const tokens = usage?.completion_tokens ?? null;
    return {
      finish_reason,
      num_prompt_tokens: usage?.prompt_tokens ?? null,
      num_completion_tokens: tokens,
      decode_tokens_per_s: tokens !== null && decode_s > 0 ? (tokens - 1) / decode_s : null,
      time_to_first_token_s: first_ms === null ? null : (first_ms - start_ms) / 1000,
    };
  }
}

async function refusal(response: Response): Promise<Error> {
  const body = (await response.json().catch(() => ({}))) as Chunk;
  return new Error(body.error?.message ?? `the server answered ${response.status}`);
}

/** The JSON objects of a stream of server-sent events, up to `[DONE]`. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<Chunk> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  let is_done = false;
  try {
    while (!is_done) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the server broke off its answer");
      text += decoder.decode(value, { stream: true });
      const events = text.split(/\r?\n\r?\n/);
      text = events.pop() ?? "";
      for (const event of events) {
        const data = event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") is_done = true;
        else if (data !== "") yield JSON.parse(data) as Chunk;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
