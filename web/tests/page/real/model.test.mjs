// The page with a real model: `everycast web`, unmodified WebLLM, WebGPU on the processor.
//
// EVERYCAST is the command, EVERYCAST_WEB_MODEL the model; it is built for browsers if it is not.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { after, before, describe, it } from "node:test";
import { answerText, ask, killGpuProcess, openBrowser, startButton } from "../harness.mjs";

const COMMAND = process.env.EVERYCAST ?? "everycast";
const MODEL = process.env.EVERYCAST_WEB_MODEL ?? "smollm2-135m";
const START_MS = 120_000;
/** Greedy and short: the processor computes. */
const SETTINGS = {
  sampling: { temperature: 0, max_tokens: 24 },
  context_window_size: 1024,
};

/** Starts the command; gives its address once it serves. */
async function startServer() {
  const server = spawn(COMMAND, ["web", MODEL, "--port", "0"], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  let said = "";
  const url = await new Promise((resolve, reject) => {
    server.stderr.on("data", (data) => {
      said += data;
      const found = /chat in a browser at (\S+)/.exec(said);
      if (found !== null) resolve(found[1]);
    });
    server.on("error", reject);
    server.on("exit", () => reject(new Error(`${COMMAND} web ended: ${said}`)));
  });
  const stop = () =>
    new Promise((resolve) => {
      server.removeAllListeners("exit");
      if (server.exitCode !== null) return resolve();
      server.on("exit", resolve);
      server.kill("SIGINT");
    });
  return { url, stop };
}

describe("a real model", () => {
  let server, browser, page;

  before(async () => {
    server = await startServer();
    browser = await openBrowser();
    browser.context.setDefaultTimeout(START_MS);
    page = await browser.context.newPage();
    await page.goto(server.url);
    await page.evaluate((settings) => {
      localStorage.setItem("everycast-settings", JSON.stringify(settings));
    }, SETTINGS);
    await page.reload();
    await startButton(page).click();
    await page.getByPlaceholder("Ask anything").waitFor();
  });
  after(async () => {
    await browser?.close();
    await server?.stop();
  });

  it("answers a question", async (test) => {
    assert.match(await ask(page, "What is the capital of France?"), /Paris/);
    test.diagnostic(await page.locator(".meta").innerText());
  });

  it("gives the same greedy answer again", async () => {
    const first = await answerText(page, 0);
    await page.getByRole("button", { name: "Regenerate answer" }).click();
    await page.locator(".growing").waitFor();
    await page.locator(".growing").waitFor({ state: "detached" });
    assert.equal(await answerText(page, 0), first);
  });

  it("stops, and then answers the next question whole", async () => {
    const whole = await answerText(page, 0);
    await page.getByRole("button", { name: "New chat" }).click();
    await page.getByLabel("Your question").fill("Count from one to a hundred.");
    await page.keyboard.press("Enter");
    await page.locator(".growing .markdown").waitFor();
    await page.keyboard.press("Escape");
    await page.getByText(/stopped · \d+ tokens/).waitFor();
    await page.getByRole("button", { name: "New chat" }).click();
    assert.equal(await ask(page, "What is the capital of France?"), whole);
  });

  it("starts again when the GPU is lost in the middle of an answer", async () => {
    await page.getByRole("button", { name: "New chat" }).click();
    await page.getByLabel("Your question").fill("Count from one to a hundred.");
    await page.keyboard.press("Enter");
    await page.locator(".growing .markdown").waitFor();
    killGpuProcess(browser.profile);
    await page.getByText(/took the GPU away.*It was started again/).waitFor();
    await page.getByText("broken off").waitFor();
    await page.getByRole("button", { name: "New chat" }).click();
    assert.match(await ask(page, "What is the capital of France?"), /Paris/);
  });

  it("writes JSON in JSON mode", async () => {
    await page.getByRole("button", { name: "New chat" }).click();
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByLabel("JSON mode").check();
    await page.keyboard.press("Escape");
    const text = await ask(page, "Give a JSON object with the key city and the capital of France.");
    assert.match(text, /^\s*\{\s*"/);
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByLabel("JSON mode").uncheck();
    await page.keyboard.press("Escape");
  });

  it("starts and answers when the server is gone", async () => {
    await page.evaluate(() => navigator.serviceWorker.ready);
    await server.stop();
    await page.reload();
    await page.getByPlaceholder("Ask anything").waitFor();
    assert.match(await ask(page, "What is the capital of France?"), /Paris/);
  });
});
