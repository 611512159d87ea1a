/** Stands in for @mlc-ai/web-llm in the page's tests: reads the caches as it does, answers by
 * script. What it does depends on the last question. */

interface Config {
  readonly appConfig: {
    readonly model_list: readonly {
      readonly model_id: string;
      readonly model: string;
      readonly model_lib: string;
    }[];
  };
  readonly initProgressCallback: (report: { progress: number }) => void;
}

interface Request {
  readonly messages: readonly { readonly role: string; readonly content: string }[];
  readonly response_format?: { readonly type: string };
  readonly temperature?: number;
}

export interface ChatCompletionChunk {
  readonly choices: readonly {
    readonly delta: { readonly content?: string };
    readonly finish_reason: string | null;
  }[];
  readonly usage?: {
    readonly prompt_tokens: number;
    readonly completion_tokens: number;
    readonly extra: { readonly decode_tokens_per_s: number };
  };
}

const MARKDOWN = `## Tides

Spring tides are the highest. They come when **Sun and Moon pull in one line**, a day or two after full and new moon ([a chart](https://example.org/tides)).

1. High water comes about every 12 h 25 min.
2. Near the equinoxes the range grows further.

\`\`\`python
def height(t, amplitude=1.8):
    return amplitude * math.cos(2 * math.pi * t / 12.42)
\`\`\`

| Port | Range |
| --- | ---: |
| Brest | 7.2 m |
| Kiel | 0.1 m |
`;
const ATTACK = `
<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">
[bad](javascript:window.pwned=1)
`;

export class MLCEngine {
  private is_interrupted = false;
  /** Held so that losing it is noticed. */
  device: GPUDevice | null = null;
  private num_answers = 0;

  constructor(private readonly config: Config) {}

  async reload(model_id: string): Promise<void> {
    const record = this.config.appConfig.model_list.find((model) => model.model_id === model_id);
    if (record === undefined) throw new Error(`no model ${model_id}`);
    const read = async (scope: string, url: string): Promise<ArrayBuffer> => {
      const response = await (await caches.open(scope)).match(url);
      if (response === undefined) throw new Error(`${url} is not in ${scope}`);
      return response.arrayBuffer();
    };
    await read("webllm/config", new URL("mlc-chat-config.json", record.model).href);
    await read("webllm/wasm", record.model_lib);
    const list = await read("webllm/model", new URL("tensor-cache.json", record.model).href);
    const shards = (
      JSON.parse(new TextDecoder().decode(list)) as { records: { dataPath: string }[] }
    ).records;
    for (const [index, { dataPath }] of shards.entries()) {
      const shard = await read("webllm/model", new URL(dataPath, record.model).href);
      if (new Uint8Array(shard)[0] !== 0x45) throw new Error(`${dataPath} is damaged`);
      this.config.initProgressCallback({ progress: (index + 1) / shards.length });
    }
    const adapter = await navigator.gpu.requestAdapter();
    if (adapter === null) throw new Error("no adapter");
    this.device = await adapter.requestDevice();
  }

  interruptGenerate(): void {
    this.is_interrupted = true;
  }

  readonly chat = {
    completions: {
      create: (request: Request): Promise<AsyncGenerator<ChatCompletionChunk>> =>
        Promise.resolve(this.answer(request)),
    },
  };

  private async *answer(request: Request): AsyncGenerator<ChatCompletionChunk> {
    this.is_interrupted = false;
    this.num_answers += 1;
    const question = request.messages.at(-1)?.content ?? "";
    if (question === "fail") throw new Error("context window size exceeded");
    if (question === "die") self.close();
    if (question === "hang") await new Promise(() => {});
    let num_tokens = 0;
    for (const token of this.tokens(question, request)) {
      await new Promise((resolve) => setTimeout(resolve, 8));
      if (this.is_interrupted) break;
      num_tokens += 1;
      yield { choices: [{ delta: { content: token }, finish_reason: null }] };
    }
    const finish_reason = this.is_interrupted ? "abort" : "stop";
    yield { choices: [{ delta: {}, finish_reason }] };
    const extra = { decode_tokens_per_s: 41.5 };
    const usage = { prompt_tokens: 12, completion_tokens: num_tokens, extra };
    yield { choices: [], usage };
  }

  private *tokens(question: string, request: Request): Generator<string> {
    if (question === "count") for (let i = 1; ; i += 1) yield `${i} `;
    const text = ((): string => {
      if (question === "markdown") return MARKDOWN + ATTACK;
      if (question.includes("tides")) return MARKDOWN;
      if (request.response_format !== undefined) return '{"answer": 42}';
      if (question === "prompt")
        return request.messages.map((m) => `${m.role}: ${m.content}`).join("\n");
      return `Answer ${this.num_answers} to: ${question}`;
    })();
    yield* text.match(/\s*\S+\s*/g) ?? [];
  }
}
