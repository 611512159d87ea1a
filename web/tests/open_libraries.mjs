// Opens WebAssembly libraries by the newest @mlc-ai/web-runtime, without a GPU: `node
// open_libraries.mjs LIBRARY...`. Prints one JSON object: library → metadata, and each kernel's WGSL
// as the runtime gets it.
import { create, globals } from "webgpu";
import fs from "node:fs";
import { createRequire } from "node:module";

const tvmjs = createRequire(import.meta.url)("@mlc-ai/web-runtime");

Object.assign(globalThis, globals);

async function open(library, device) {
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
  const shaders = Object.fromEntries(names.map((name) => [name, source(name)]));
  const metadata = JSON.parse(machine.getFunction("_metadata")());
  runtime.endScope();
  return { shaders, metadata };
}

// Dawn's promises are kept only as long as its GPU object is.
const gpu = create(["backend=null"]);
const results = {};
for (const library of process.argv.slice(2)) {
  const adapter = await gpu.requestAdapter();
  results[library] = await open(library, await adapter.requestDevice());
}
process.stdout.write(JSON.stringify(results) + "\n", () => process.exit(gpu ? 0 : 1));
