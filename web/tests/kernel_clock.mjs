// Measures each kernel that WebLLM starts, by the device's own clock (`timestamp-query`).
const CAPACITY = 4096; // timestamps of a query set: two a kernel

const names = new WeakMap(); // pipeline → kernel
let device;
let queries;
let running = false;
let started = []; // [kernel, first timestamp] since the last reading

function replace(owner, method, make) {
  owner.prototype[method] = make(owner.prototype[method]);
}

replace(GPUAdapter, "requestDevice", (original) => {
  return async function (description) {
    const requiredFeatures = [...(description.requiredFeatures ?? []), "timestamp-query"];
    device = await original.call(this, { ...description, requiredFeatures });
    queries = device.createQuerySet({ type: "timestamp", count: CAPACITY });
    return device;
  };
});

replace(GPUDevice, "createComputePipelineAsync", (original) => {
  return async function (description) {
    const pipeline = await original.call(this, description);
    names.set(pipeline, description.compute.entryPoint);
    return pipeline;
  };
});

replace(GPUCommandEncoder, "beginComputePass", (original) => {
  return function (description) {
    const first = 2 * started.length;
    if (!running || first + 2 > CAPACITY) return original.call(this, description);
    const timestampWrites = {
      querySet: queries,
      beginningOfPassWriteIndex: first,
      endOfPassWriteIndex: first + 1,
    };
    started.push(["?", first]);
    return original.call(this, { ...description, timestampWrites });
  };
});

replace(GPUComputePassEncoder, "setPipeline", (original) => {
  return function (pipeline) {
    if (running && started.length > 0) started.at(-1)[0] = names.get(pipeline) ?? "?";
    return original.call(this, pipeline);
  };
});

export function startClock() {
  started = [];
  running = true;
}

/** Milliseconds and number of starts of each kernel since `startClock`. */
export async function readClock() {
  running = false;
  const size = 8 * CAPACITY;
  const { QUERY_RESOLVE, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
  const resolved = device.createBuffer({ size, usage: QUERY_RESOLVE | COPY_SRC });
  const read = device.createBuffer({ size, usage: COPY_DST | MAP_READ });
  const encoder = device.createCommandEncoder();
  encoder.resolveQuerySet(queries, 0, 2 * started.length, resolved, 0);
  encoder.copyBufferToBuffer(resolved, 0, read, 0, size);
  device.queue.submit([encoder.finish()]);
  await read.mapAsync(GPUMapMode.READ);
  const times_ns = new BigUint64Array(read.getMappedRange());
  const kernels = {};
  for (const [name, first] of started) {
    const kernel = (kernels[name] ??= { starts: 0, ms: 0 });
    kernel.starts += 1;
    kernel.ms += Number(times_ns[first + 1] - times_ns[first]) / 1e6;
  }
  read.destroy();
  resolved.destroy();
  return kernels;
}
