// Validates WGSL by Dawn's null backend: `node validate_wgsl.mjs PACKAGE FILE`. PACKAGE is the folder
// of npm's package webgpu, FILE holds kernel name → source as JSON. The last line that
// it prints is {version, faults}.
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, file] = process.argv.slice(2);
const require = createRequire(path.join(folder, "package.json"));
const { create, globals } = await import(pathToFileURL(require.resolve(folder)));
Object.assign(globalThis, globals);

// Dawn's promises are kept only as long as its GPU object is.
const gpu = create(["backend=null"]);
const adapter = await gpu.requestAdapter();
const requiredFeatures = ["shader-f16", "subgroups"].filter((name) => adapter.features.has(name));
const device = await adapter.requestDevice({ requiredFeatures });
const faults = [];
for (const [name, code] of Object.entries(JSON.parse(fs.readFileSync(file, "utf8")))) {
  const module = device.createShaderModule({ code });
  for (const { type, message, lineNum } of (await module.getCompilationInfo()).messages) {
    if (type === "error") faults.push(`${name}: line ${lineNum}: ${message.split("\n")[0]}`);
  }
}
const { version } = JSON.parse(fs.readFileSync(path.join(folder, "package.json"), "utf8"));
process.stdout.write(JSON.stringify({ version, faults }) + "\n", () => process.exit(gpu ? 0 : 1));
