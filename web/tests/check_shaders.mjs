// Checks the kernels of WebAssembly libraries without a GPU: `node check_shaders.mjs LIBRARY...`.
//
// A library is opened by the newest @mlc-ai/web-runtime; each of its kernels is compiled by Dawn, the
// WebGPU of Chromium, on its null backend, which has float16, and held against the limits that WebLLM
// asks of a device. Prints one JSON object: library → number of kernels, faults, metadata, and how
// much of each limit is used.
import { create, globals } from "webgpu";
import fs from "node:fs";
import { createRequire } from "node:module";

const tvmjs = createRequire(import.meta.url)("@mlc-ai/web-runtime");

const LIMITS = { buffers: 10, threads: 256, shared_bytes: 32 << 10 };
const SCALAR_BYTES = { f16: 2, f32: 4, i32: 4, u32: 4, bool: 4, "atomic<u32>": 4, "atomic<i32>": 4 };

Object.assign(globalThis, globals);

async function check(library, device) {
  const runtime = await tvmjs.instantiate(
    fs.readFileSync(library),
    tvmjs.createPolyfillWASI(),
    console.error,
  );
  runtime.initWebGPU(device);
  runtime.beginScope();
  const machine = runtime.createVirtualMachine(runtime.webgpu());
  const kernels = machine.getInternalModule();
  const names = Object.keys(JSON.parse(kernels.getFunction("webgpu.get_fmap", true)()));
  const source = kernels.getFunction("webgpu.get_shader", true);
  const faults = [];
  const used = { buffers: 0, threads: 0, shared_bytes: 0 };
  for (const name of names) {
    const code = source(name);
    const module = device.createShaderModule({ code });
    for (const { type, message, lineNum } of (await module.getCompilationInfo()).messages) {
      if (type === "error") faults.push(`${name}:${lineNum}: ${message}`);
    }
    for (const [limit, value] of Object.entries(measure(code))) {
      used[limit] = Math.max(used[limit], value);
      if (!(value <= LIMITS[limit])) {
        faults.push(`${name}: ${limit} ${value}, more than ${LIMITS[limit]}`);
      }
    }
  }
  const metadata = JSON.parse(machine.getFunction("_metadata")());
  runtime.endScope();
  return { num_kernels: names.length, faults, used, metadata };
}

/** Storage buffers, threads of a block, and bytes of its memory that a kernel asks for. */
function measure(code) {
  const size = /@workgroup_size\(([^)]*)\)/.exec(code)[1];
  const shared = [...code.matchAll(/var<workgroup>\s+\w+\s*:\s*([^;]+);/g)];
  return {
    buffers: [...code.matchAll(/var<storage/g)].length,
    threads: size.split(",").reduce((product, factor) => product * Number(factor), 1),
    shared_bytes: shared.reduce((sum, [, type]) => sum + numBytes(type.trim()), 0),
  };
}

/** Bytes of a WGSL type; NaN for one that is not known here, which is no number within a limit. */
function numBytes(type) {
  const array = /^array<(.+),\s*(\d+)>$/.exec(type);
  if (array) return numBytes(array[1].trim()) * Number(array[2]);
  const vector = /^vec([234])<(\w+)>$/.exec(type);
  if (vector) return numBytes(vector[2]) * (vector[1] === "2" ? 2 : 4);
  return SCALAR_BYTES[type] ?? NaN;
}

// Dawn's promises are kept only as long as its GPU object is.
const gpu = create(["backend=null"]);
const results = {};
for (const library of process.argv.slice(2)) {
  const adapter = await gpu.requestAdapter();
  const requiredFeatures = ["shader-f16", "subgroups"].filter((name) => adapter.features.has(name));
  results[library] = await check(library, await adapter.requestDevice({ requiredFeatures }));
}
process.stdout.write(JSON.stringify(results) + "\n", () => process.exit(gpu ? 0 : 1));
