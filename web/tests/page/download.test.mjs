// The page in Chromium: downloads that are cut, poisoned, refused or too large, and each ends in
// the right state; devices that cannot run the model; the page without a network.

import assert from "node:assert/strict";
import { after, afterEach, before, beforeEach, describe, it } from "node:test";
import { ask, makeModel, openBrowser, openPage, startButton, startHost } from "./harness.mjs";

const SHARD = "params_shard_1.bin";

describe("download", () => {
  let host, browser, context, page;

  before(async () => {
    browser = await openBrowser();
    context = browser.context;
  });
  after(async () => {
    await browser?.close();
  });
  beforeEach(async () => {
    host = await startHost(); // on a port of its own: nothing is stored for it
    page = await openPage(context, host);
    await startButton(page).waitFor();
  });
  afterEach(async () => {
    assert.deepEqual(page.faults, []);
    await page.close();
    await host.close();
  });

  /** URLs of what WebLLM would find, with the kind of each. */
  const cached = () =>
    page.evaluate(async () => {
      const found = [];
      for (const name of ["webllm/config", "webllm/model", "webllm/wasm"]) {
        const cache = await caches.open(name);
        for (const request of await cache.keys()) {
          const response = await cache.match(request);
          const { size } = await response.blob();
          found.push(`${request.url.split("/").at(-1)} ${size}`);
        }
      }
      return found.sort();
    });
  const WHOLE = [
    "mlc-chat-config.json 22",
    "params_shard_0.bin 200000",
    "params_shard_1.bin 200000",
    "params_shard_2.bin 200000",
    "tokenizer.json 2",
    "webgpu.wasm 1000",
  ];
  const assertWhole = async () => {
    const found = (await cached()).filter((entry) => !entry.startsWith("tensor-cache.json"));
    assert.deepEqual(found, WHOLE);
  };
  const ready = () => page.getByPlaceholder("Ask anything").waitFor();
  const rangesOf = (name) =>
    host.requests.filter((request) => request.name.endsWith(name)).map(({ range }) => range);

  it("says what it takes before a byte of the model moves", async () => {
    await page.getByText(/601\skB in 7 files, once\./).waitFor();
    await page.getByText("google swiftshader, which computes on the CPU").waitFor();
    await page.getByText("It can run the model: the f32 build.").waitFor();
    await page.getByText(/lets this site store .* more/).waitFor();
    assert.deepEqual(
      host.requests.filter(({ name }) => name.startsWith("models/")),
      [],
    );
  });

  it("fetches only the library that this device takes", async () => {
    await startButton(page).click();
    await ready();
    await assertWhole();
  });

  it("resumes a cut file with a range", async () => {
    host.faults.set(SHARD, ["cut"]);
    await startButton(page).click();
    await ready();
    assert.deepEqual(rangesOf(SHARD), [null, "bytes=100000-"]);
    await assertWhole();
  });

  it("shows bytes, rate and time left, and goes on where it was paused", async () => {
    for (const i of [0, 1, 2]) host.faults.set(`params_shard_${i}.bin`, ["slow"]);
    await startButton(page).click();
    await page.getByText(/kB of 601\skB · \d+(\.\d+)?\skB\/s · .* left$/).waitFor();
    await page.getByRole("button", { name: "Pause" }).click();
    await startButton(page).waitFor();
    await page.reload();
    await startButton(page).click();
    await ready();
    assert.match(String(rangesOf("params_shard_0.bin").at(-1)), /^bytes=\d+-$/);
    await assertWhole();
  });

  it("takes a sign-in page for what it is; the next try is whole", async () => {
    host.faults.set(SHARD, ["html"]);
    await startButton(page).click();
    await page.getByText("A web page came instead of params_shard_1.bin").waitFor();
    assert.ok(!(await cached()).some((entry) => entry.startsWith(SHARD)));
    await page.getByRole("button", { name: "Try again" }).click();
    await ready();
    await assertWhole();
  });

  it("says that a file is missing", async () => {
    host.faults.set(SHARD, ["404"]);
    await startButton(page).click();
    await page.getByText("The host answered 404 for params_shard_1.bin").waitFor();
    await page.getByRole("button", { name: "Try again" }).click();
    await ready();
    await assertWhole();
  });

  it("survives HTML, 404 and a cut one after the other", async () => {
    host.faults.set(SHARD, ["html", "404", "cut"]);
    await startButton(page).click();
    for (const text of [/A web page came/, /answered 404/]) {
      await page.getByText(text).waitFor();
      await page.getByRole("button", { name: "Try again" }).click();
    }
    await ready();
    await assertWhole();
  });

  it("stores nothing of a file that arrives damaged", async () => {
    host.faults.set(SHARD, ["corrupt", "corrupt"]);
    await startButton(page).click();
    await page.getByText("arrived with wrong contents").waitFor();
    assert.ok(!(await cached()).some((entry) => entry.startsWith(SHARD)));
  });

  it("finds and repairs what poisoned the cache", async () => {
    const url = `${host.url}${host.models[0].record.base}${SHARD}`;
    await page.evaluate(async (poisoned) => {
      const cache = await caches.open("webllm/model");
      await cache.put(poisoned, new Response("<!doctype html><title>Sign in</title>"));
    }, url);
    await startButton(page).click();
    await ready();
    await assertWhole();
  });

  it("repairs stored files that were damaged later, when the model does not start", async () => {
    await startButton(page).click();
    await ready();
    const url = `${host.url}${host.models[0].record.base}${SHARD}`;
    await page.evaluate(async (damaged) => {
      const cache = await caches.open("webllm/model");
      const { headers } = await cache.match(damaged);
      await cache.put(damaged, new Response(new Uint8Array(200_000), { headers }));
    }, url);
    await page.reload();
    await ready();
    assert.equal(rangesOf(SHARD).length, 2);
  });

  it("explains a full quota, and runs without storing", async () => {
    const session = await context.newCDPSession(page);
    const { origin } = new URL(host.url);
    await session.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 250_000 });
    await startButton(page).click();
    await page.getByText("The browser lets this site store no more.").waitFor();
    await page.getByRole("alert").getByRole("button", { name: "Run without storing" }).click();
    await ready();
    assert.match(await ask(page, "from memory"), /^Answer \d to: from memory$/);
  });

  it("warns of too little space before anything is fetched", async () => {
    await page.addInitScript(() => {
      StorageManager.prototype.estimate = () => Promise.resolve({ quota: 1000, usage: 900 });
    });
    await page.reload();
    await page.getByText("The browser lets this site store 100").waitFor();
    await page.getByText("That is too little.").waitFor();
    await page.getByRole("button", { name: "Run without storing" }).click();
    await ready();
    assert.ok(!(await cached()).some((entry) => entry.startsWith("params_shard")));
  });

  it("removes a model with one click", async () => {
    await startButton(page).click();
    await ready();
    await page.getByRole("button", { name: "tiny f32" }).click();
    await page.getByRole("button", { name: /^Remove 601\skB$/ }).click();
    await page
      .getByRole("dialog")
      .getByText(/601\skB in 7 files, once\./)
      .waitFor();
    assert.deepEqual(await cached(), []);
  });

  it("lets a second tab wait for the first one's download, not repeat it", async () => {
    for (const i of [0, 1, 2]) host.faults.set(`params_shard_${i}.bin`, ["slow"]);
    await startButton(page).click();
    await page.getByText("Downloading…").waitFor();
    const other = await openPage(context, host);
    await startButton(other).click();
    await other.getByText("Another tab is downloading this model…").waitFor();
    await other.getByPlaceholder("Ask anything").waitFor();
    await ready();
    assert.equal(rangesOf(SHARD).length, 1);
    await other.close();
  });

  it("drops the files of an older version", async () => {
    await startButton(page).click();
    await ready();
    host.models[0] = makeModel("tiny", { version: "v2" });
    await page.reload();
    await startButton(page).click();
    await ready();
    await assertWhole();
  });

  it("opens, starts and answers without a network", async () => {
    await startButton(page).click();
    await ready();
    await page.evaluate(() => navigator.serviceWorker.ready);
    host.is_offline = true;
    await page.reload();
    await ready();
    assert.equal(await ask(page, "offline"), "Answer 1 to: offline");
  });
});

describe("a device", () => {
  let host, browser;

  before(async () => {
    host = await startHost({
      models: [
        makeModel("half", {
          libraries: [{ path: "lib/webgpu-f16.wasm", features: ["shader-f16"] }],
        }),
      ],
    });
  });
  afterEach(async () => {
    host.completions = null;
    await browser.close();
  });
  after(() => host.close());

  const hideGpu = (context) => context.addInitScript(() => delete Navigator.prototype.gpu);

  it("without shader-f16 is told so, and nothing is downloaded", async () => {
    browser = await openBrowser();
    const page = await openPage(browser.context, host);
    await page.getByText("lacks the WebGPU feature shader-f16").waitFor();
    assert.equal(await startButton(page).count(), 0);
    assert.ok(!host.requests.some(({ name }) => name.startsWith("models/")));
  });

  it("without WebGPU is told so", async () => {
    browser = await openBrowser();
    await hideGpu(browser.context);
    const page = await openPage(browser.context, host);
    await page.getByText("This browser has no WebGPU.").waitFor();
    assert.equal(await page.getByLabel("Your question").count(), 0);
  });

  it("whose page was opened on plain http is told so, and may use the server", async () => {
    host.completions = "The server answers this.";
    browser = await openBrowser({ flags: ["--host-resolver-rules=MAP insecure.test 127.0.0.1"] });
    const url = host.url.replace("127.0.0.1", "insecure.test");
    const page = await openPage(browser.context, { url });
    assert.equal(await ask(page, "who?"), "The server answers this.");
    await page.getByRole("button", { name: "served-model server" }).click();
    await page.getByText("was not opened securely").waitFor();
    assert.deepEqual(page.faults, []);
  });

  it("without WebGPU is answered by the host's server, if there is one", async () => {
    host.completions = "The server answers this.";
    browser = await openBrowser();
    await hideGpu(browser.context);
    const page = await openPage(browser.context, host);
    await page.getByRole("button", { name: "served-model server" }).waitFor();
    assert.equal(await ask(page, "who?"), "The server answers this.");
  });
});
