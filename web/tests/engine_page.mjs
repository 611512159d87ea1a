// What tests ask of stock WebLLM in a page. Each function takes and gives plain JSON.
import * as webllm from "@mlc-ai/web-llm";

const MODEL_ID = "model";
let engine;
const pipelines = { compiled: 0, faults: [] };

const compilePipeline = GPUDevice.prototype.createComputePipelineAsync;
GPUDevice.prototype.createComputePipelineAsync = async function (description) {
  try {
    const pipeline = await compilePipeline.call(this, description);
    pipelines.compiled += 1;
    return pipeline;
  } catch (error) {
    pipelines.faults.push(`${description.compute.entryPoint}: ${error.message}`);
    throw error;
  }
};

// What WebGPU promises of every device, and no more.
const PROMISED = { maxBufferSize: 2 ** 28, maxStorageBufferBindingSize: 2 ** 27 };

// Errors that nobody waits for, such as of a kernel's arguments.
const requestDevice = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (description) {
  const requiredLimits = { ...description?.requiredLimits, ...PROMISED };
  const device = await requestDevice.call(this, { ...description, requiredLimits });
  device.addEventListener("uncapturederror", ({ error }) => pipelines.faults.push(error.message));
  return device;
};

/** The pipeline of the loaded model: WebLLM's own object, for what its interface does not tell. */
function pipeline() {
  return engine.loadedModelIdToPipeline.get(MODEL_ID);
}

async function collect(stream) {
  const started = performance.now();
  const chunks = {
    pieces: [],
    times_ms: [],
    logprobs: [],
    top_logprobs: [],
    finish_reason: null,
    usage: null,
  };
  for await (const chunk of stream) {
    const [choice] = chunk.choices;
    const piece = choice?.delta?.content ?? choice?.text;
    if (piece) {
      chunks.pieces.push(piece);
      chunks.times_ms.push(performance.now() - started);
    }
    for (const token of choice?.logprobs?.content ?? []) {
      chunks.logprobs.push(token.logprob);
      chunks.top_logprobs.push(token.top_logprobs.map(({ logprob }) => logprob));
    }
    chunks.finish_reason = choice?.finish_reason ?? chunks.finish_reason;
    chunks.usage = chunk.usage ?? chunks.usage;
  }
  return { ...chunks, text: chunks.pieces.join(""), ids: [...pipeline().outputIds] };
}

const calls = {
  async describe_adapter() {
    const adapter = await navigator.gpu.requestAdapter();
    const { vendor, architecture, description } = adapter.info;
    return { vendor, architecture, description, features: [...adapter.features] };
  },

  /** Loads `library` and the weights below `base`; says how long it took and what was compiled. */
  async load({ base, library, overrides = {} }) {
    const started = performance.now();
    const model = new URL(base, location.href).href;
    const record = { model, model_id: MODEL_ID, model_lib: model + "resolve/main/" + library, overrides };
    engine = await webllm.CreateMLCEngine(MODEL_ID, {
      appConfig: { model_list: [record], cacheBackend: "cache" },
      logLevel: "WARN",
    });
    return { load_ms: performance.now() - started, pipelines };
  },

  tokenize({ text }) {
    return [...pipeline().tokenizer.encode(text)];
  },

  /** A chat completion, or a completion where there is a `prompt`; ids are those of all tokens. */
  async generate({ request }) {
    return collect(await start(request));
  },

  /** The same, interrupted after `after` pieces. */
  async generate_interrupted({ request, after }) {
    const stream = await start(request);
    let num_pieces = 0;
    async function* interrupting() {
      for await (const chunk of stream) {
        yield chunk;
        if (++num_pieces === after) engine.interruptGenerate();
      }
    }
    return collect(interrupting());
  },

  /** Kernels of the prefill of `prompt`, and of one token after it; needs kernel_page.html. */
  async kernel_times({ prompt }) {
    const { readClock, startClock } = await import("/tests/kernel_clock.mjs");
    const request = { prompt, max_tokens: 2, temperature: 0, ignore_eos: true };
    const tokens = (await start(request))[Symbol.asyncIterator]();
    // The first token comes with the prefill and the second with a step of decoding; only texts
    // are given out, so the pipeline's own steps are what is watched.
    const times = {};
    for (const [phase, method] of [["prefill", "prefillStep"], ["decode", "decodeStep"]]) {
      const step = pipeline()[method];
      pipeline()[method] = async function (...args) {
        startClock();
        const result = await step.apply(this, args);
        await this.device.sync();
        times[phase] = await readClock();
        return result;
      };
    }
    while (!(await tokens.next()).done);
    for (const method of ["prefillStep", "decodeStep"]) delete pipeline()[method];
    return times;
  },

  /** Several requests at once; WebLLM takes them in turn. */
  async generate_together({ requests }) {
    const texts = requests.map(async (request) => {
      let text = "";
      for await (const chunk of await start(request)) text += chunk.choices[0]?.delta?.content ?? "";
      return text;
    });
    return Promise.all(texts);
  },

  /** Draws one token for each of the numbers `uniform` in [0, 1) from a row of probabilities. */
  async draw({ probabilities, top_p, uniform }) {
    const { tvm, device, fargsortProbs, fsampleWithTopP } = pipeline();
    tvm.beginScope();
    const upload = (shape, type, values) => tvm.empty(shape, type, device).copyFrom(values);
    const row = upload([1, probabilities.length], "float32", Float32Array.from(probabilities));
    const sorted = fargsortProbs(row);
    const rows = upload([1], "int32", Int32Array.of(0));
    const threshold = upload([1], "float32", Float32Array.of(top_p));
    // Numbers and tokens are copied on the device: what the host writes, and what is given back to
    // it, ends a batch of commands.
    const createView = tvm.getGlobalFunc("runtime.TVMTensorCreateView");
    const part = (tensor, type, index) =>
      createView(tensor, tvm.makeShapeTuple([1]), type, tvm.scalar(4 * index, "int"));
    const numbers = upload([uniform.length], "float32", Float32Array.from(uniform));
    const drawn = tvm.empty([uniform.length], "int32", device);
    const number = tvm.empty([1], "float32", device);
    for (let first = 0; first < uniform.length; first += 200) {
      tvm.beginScope();
      for (let index = first; index < Math.min(first + 200, uniform.length); index++) {
        number.copyFrom(part(numbers, "float32", index));
        const token = fsampleWithTopP(sorted.get(0), sorted.get(1), number, rows, threshold);
        part(drawn, "int32", index).copyFrom(token);
      }
      tvm.endScope();
    }
    const tokens = tvm.empty([uniform.length], "int32", tvm.cpu()).copyFrom(drawn);
    await device.sync();
    const result = [...tokens.toArray()];
    tvm.endScope();
    return result;
  },

  /** What went wrong on the device so far. */
  faults() {
    return pipelines.faults;
  },

  async unload() {
    await engine.unload();
  },
};

function start(request) {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  if (request.prompt !== undefined) return engine.completions.create(streamed);
  return engine.chat.completions.create(streamed);
}

window.calls = calls;
