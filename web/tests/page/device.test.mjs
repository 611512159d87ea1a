// The page in Chromium: which library it takes for the device, whose subgroups have four threads.

import assert from "node:assert/strict";
import { after, before, it } from "node:test";
import { makeModel, openBrowser, openReady, startHost } from "./harness.mjs";

let host, browser;

before(async () => {
  const subgroups = (path, min_subgroup_size) => ({
    path,
    features: ["subgroups"],
    min_subgroup_size,
  });
  const libraries = [
    { path: "lib/webgpu.wasm", features: [] },
    subgroups("lib/webgpu-four.wasm", 4),
    subgroups("lib/webgpu-eight.wasm", 8),
  ];
  host = await startHost({ models: [makeModel("tiny", { libraries })] });
  browser = await openBrowser();
});
after(async () => {
  await browser?.close();
  await host?.close();
});

it("takes subgroups as wide as the device has them, and no wider", async () => {
  const page = await openReady(browser.context, host);
  const names = host.requests.map(({ name }) => name.split("/").at(-1));
  const loaded = [...new Set(names.filter((name) => name.endsWith(".wasm")))];
  assert.deepEqual(loaded, ["webgpu-four.wasm"]);
  assert.deepEqual(page.faults, []);
});
