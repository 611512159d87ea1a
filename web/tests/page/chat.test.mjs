// The page in Chromium, on a mock engine: chatting, and an engine that stops, dies, hangs or loses
// its GPU.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, afterEach, before, beforeEach, describe, it } from "node:test";
import {
  answerText,
  ask,
  killGpuProcess,
  openBrowser,
  openPage,
  openReady,
  startHost,
} from "./harness.mjs";

describe("chat", () => {
  let host, browser, context, page;

  before(async () => {
    host = await startHost();
    browser = await openBrowser();
    context = browser.context;
  });
  after(async () => {
    await browser?.close();
    await host?.close();
  });
  beforeEach(async () => {
    page = await openReady(context, host);
  });
  afterEach(async () => {
    assert.deepEqual(page.faults, []);
    await page.close();
  });

  const question = (text) => page.getByRole("article", { name: "You" }).filter({ hasText: text });

  it("answers, and says how fast", async () => {
    assert.equal(await ask(page, "hello"), "Answer 1 to: hello");
    await page.getByText(/4 tokens · 42\stokens\/s · first after \d+\sms/).waitFor();
    assert.equal(await page.title(), "everycast");
  });

  it("shows Markdown, and nothing of a model's HTML comes alive", async () => {
    await ask(page, "markdown");
    const answer = page.locator(".answer .markdown");
    assert.equal(await answer.locator("table td").count(), 4);
    assert.equal(await answer.locator("script, img").count(), 0);
    assert.match(await answer.innerText(), /<script>window\.pwned = 1<\/script>/);
    assert.equal(await page.evaluate(() => window.pwned), undefined);
    await answer.getByRole("button", { name: "Copy" }).waitFor();
  });

  it("stops when asked to, and answers the next question whole", async () => {
    await page.getByLabel("Your question").fill("count");
    await page.keyboard.press("Enter");
    await page.locator(".growing").getByText(/ 5 /).waitFor();
    await page.keyboard.press("Escape");
    await page.getByText(/stopped · \d+ tokens/).waitFor();
    assert.match(await answerText(page, 0), /^1 2 3 4 5 /);
    assert.equal(await ask(page, "and now"), "Answer 2 to: and now");
  });

  it("regenerates an answer in its place", async () => {
    await ask(page, "one");
    await page.getByRole("button", { name: "Regenerate answer" }).click();
    await page.locator(".answer").getByText("Answer 2 to: one").waitFor();
    assert.equal(await page.locator(".answer").count(), 1);
  });

  it("asks an edited question again, and drops what followed", async () => {
    await ask(page, "one");
    await ask(page, "two");
    await question("one").hover();
    await question("one").getByRole("button", { name: "Edit question" }).click();
    await page.getByRole("textbox", { name: "Edit question" }).fill("three");
    await page.keyboard.press("Enter");
    await page.locator(".answer").getByText("Answer 3 to: three").waitFor();
    assert.equal(await page.getByRole("article").count(), 2);
  });

  it("leaves a question alone when editing is given up", async () => {
    await ask(page, "one");
    await question("one").hover();
    await question("one").getByRole("button", { name: "Edit question" }).click();
    await page.getByRole("textbox", { name: "Edit question" }).fill("three");
    await page.keyboard.press("Escape");
    await question("one").waitFor();
    assert.equal(await page.getByRole("article").count(), 2);
  });

  it("passes the system prompt, the turns and JSON mode on", async () => {
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByLabel("System prompt").fill("Be brief.");
    await page.getByRole("button", { name: "Close", exact: true }).click();
    await ask(page, "first");
    const turns = await ask(page, "prompt");
    assert.equal(
      turns,
      "system: Be brief.\nuser: first\nassistant: Answer 1 to: first\nuser: prompt",
    );
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByLabel("JSON mode").check();
    await page.keyboard.press("Escape");
    assert.deepEqual(JSON.parse(await ask(page, "in JSON")), { answer: 42 });
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByRole("button", { name: "Back to the defaults" }).click();
    await page.keyboard.press("Escape");
  });

  it("says why there is no answer, and goes on", async () => {
    await page.getByLabel("Your question").fill("fail");
    await page.keyboard.press("Enter");
    await page.getByText("No answer: context window size exceeded").waitFor();
    assert.equal(await ask(page, "again"), "Answer 2 to: again");
  });

  it("keeps conversations, opens and deletes them", async () => {
    const title = `kept ${Date.now()}`;
    await ask(page, title);
    await page.reload();
    await page.getByPlaceholder("Ask anything").waitFor(); // stored: starts by itself
    await page.getByRole("button", { name: title, exact: true }).click();
    assert.equal(await answerText(page, 0), `Answer 1 to: ${title}`);
    page.once("dialog", (dialog) => dialog.accept());
    await page.getByRole("button", { name: `Delete “${title}”` }).click();
    await page.getByRole("button", { name: title, exact: true }).waitFor({ state: "detached" });
  });

  it("exports a conversation", async () => {
    await ask(page, "Export me");
    for (const [name, pattern] of [
      ["Markdown", /## You\n\nExport me/],
      ["JSON", /"format": "everycast-conversation"/],
    ]) {
      await page.getByRole("button", { name: "Export this chat" }).click();
      const [download] = await Promise.all([
        page.waitForEvent("download"),
        page.getByRole("button", { name, exact: true }).click(),
      ]);
      assert.match(readFileSync(await download.path(), "utf8"), pattern);
      await page.keyboard.press("Escape");
    }
  });

  it("works in two tabs at once, which share the history", async () => {
    const other = await openPage(context, host);
    await other.getByPlaceholder("Ask anything").waitFor();
    const title = `from the other tab ${Date.now()}`;
    const [here, there] = await Promise.all([ask(page, "here"), ask(other, title)]);
    assert.equal(here, "Answer 1 to: here");
    assert.equal(there, `Answer 1 to: ${title}`);
    await page.getByRole("button", { name: title, exact: true }).waitFor();
    await other.close();
  });

  it("starts again when the engine's worker dies, and says so", async () => {
    await page.getByLabel("Your question").fill("die");
    await page.keyboard.press("Enter");
    await page.getByText(/worker ended.*It was started again/).waitFor();
    assert.equal(await ask(page, "alive?"), "Answer 1 to: alive?");
  });

  it("starts again when an engine does not stop", async () => {
    await page.clock.install();
    await page.getByLabel("Your question").fill("hang");
    await page.keyboard.press("Enter");
    await page.getByText("Reading your question…").waitFor();
    await page.getByRole("button", { name: "Stop answering" }).click();
    await page.getByText("Stopping…").waitFor();
    await page.clock.runFor(61_000);
    await page.getByText(/did not stop when asked to.*It was started again/).waitFor();
    assert.equal(await ask(page, "alive?"), "Answer 1 to: alive?");
  });

  it("starts again when the GPU is lost, and says so", async () => {
    await ask(page, "before");
    killGpuProcess(browser.profile);
    await page.getByText(/took the GPU away.*It was started again/).waitFor();
    assert.equal(await ask(page, "after"), "Answer 1 to: after");
  });
});
