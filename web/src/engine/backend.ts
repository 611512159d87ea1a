/** What the chat needs from whatever answers: the engine of this device, or a server. */

export interface ChatMessage {
  readonly role: "system" | "user" | "assistant";
  readonly content: string;
}

/** null: the model's own default. */
export interface SamplingSettings {
  readonly temperature: number | null;
  readonly top_p: number | null;
  readonly max_tokens: number | null;
  readonly frequency_penalty: number | null;
  readonly presence_penalty: number | null;
  readonly seed: number | null;
  /** The answer must be one JSON object. */
  readonly is_json_mode: boolean;
}

export interface ChatRequest {
  readonly messages: readonly ChatMessage[];
  readonly sampling: SamplingSettings;
}

export type FinishReason = "stop" | "length" | "interrupted";

export interface ChatOutcome {
  readonly finish_reason: FinishReason;
  readonly num_prompt_tokens: number | null;
  readonly num_completion_tokens: number | null;
  readonly decode_tokens_per_s: number | null;
  readonly time_to_first_token_s: number | null;
}

export interface Backend {
  /** Streams an answer. When `signal` is aborted it ends with `interrupted`; it rejects with an
   * error that is fit to be shown. */
  chat(
    request: ChatRequest,
    onText: (delta: string) => void,
    signal: AbortSignal,
  ): Promise<ChatOutcome>;
}

/** The request in the words of OpenAI's API, which the engine and the server both speak. */
export function openAIRequest(request: ChatRequest): Record<string, unknown> {
  const { is_json_mode, ...sampling } = request.sampling;
  const set = Object.entries(sampling).filter(([, value]) => value !== null);
  return {
    messages: request.messages,
    ...Object.fromEntries(set),
    ...(is_json_mode ? { response_format: { type: "json_object" } } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}
