// The page in Chromium: no serious fault by axe-core in any state, light and dark, on a desk and on
// a phone; and all of it by keyboard.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, describe, it } from "node:test";
import { ask, openBrowser, openPage, startButton, startHost } from "./harness.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Faults that axe-core calls serious or critical. */
async function seriousFaults(page) {
  // By the debugger: the page's own policy lets no script in.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations
    .filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" ")}`);
}

describe("the page", () => {
  let host, browser, page;

  before(async () => {
    host = await startHost();
    browser = await openBrowser();
  });
  after(async () => {
    await browser?.close();
    await host?.close();
  });

  const looks = async (state) => {
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
      for (const [width, height] of [
        [1280, 800],
        [390, 844],
      ]) {
        await page.setViewportSize({ width, height });
        assert.deepEqual(await seriousFaults(page), [], `${state}, ${colorScheme}, ${width} px`);
        const overflow = await page.evaluate(
          () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
        );
        assert.equal(overflow, 0, `${state} is wider than ${width} px`);
      }
    }
    await page.setViewportSize({ width: 1280, height: 800 });
  };

  it("is accessible before a model is there, with a chat, and in its dialogs", async () => {
    page = await openPage(browser.context, host);
    await startButton(page).waitFor();
    await looks("the choice of a model");
    host.faults.set("params_shard_1.bin", ["404"]);
    await startButton(page).click();
    await page.getByText("The host answered 404").waitFor();
    await looks("a notice");
    await page.getByRole("button", { name: "Try again" }).click();
    await page.getByPlaceholder("Ask anything").waitFor();
    await looks("an empty chat");
    await ask(page, "markdown");
    await looks("a chat");
    await page.getByRole("button", { name: "Settings" }).click();
    await looks("the settings");
    await page.keyboard.press("Escape");
    await page.getByRole("button", { name: "tiny f32" }).click();
    await looks("the model's dialog");
    await page.keyboard.press("Escape");
    assert.deepEqual(page.faults, []);
  });

  it("is all done by keyboard", async () => {
    await page.reload();
    // The field gets the focus by itself, right after it appears.
    await page.locator("textarea:focus").waitFor();
    await page.keyboard.type("typed");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("twice");
    await page.keyboard.press("Enter");
    await page.locator(".answer:not(.growing)").getByText("Answer 1 to: typed").waitFor();
    await page.keyboard.press("Shift+Tab");
    assert.match(await focused(page), /Regenerate answer/);
    await page.keyboard.press("Enter");
    await page.locator(".answer").getByText("Answer 2 to: typed").waitFor();
  });

  it("slides its list over the page on a phone", async () => {
    await page.setViewportSize({ width: 390, height: 844 });
    const list = page.getByRole("complementary", { name: "History and settings" });
    assert.equal(await list.isVisible(), false);
    await page.getByRole("button", { name: "Conversations" }).click();
    await list.waitFor();
    await page.keyboard.press("Escape");
    await list.waitFor({ state: "hidden" });
  });

  it("takes the colours that were chosen, and keeps them", async () => {
    await page.setViewportSize({ width: 1280, height: 800 });
    await page.emulateMedia({ colorScheme: "light" });
    const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await paper();
    await page.getByRole("button", { name: "Settings" }).click();
    await page.getByLabel("Colours").selectOption("dark");
    await page.keyboard.press("Escape");
    const dark = await paper();
    assert.notEqual(dark, light);
    await page.reload();
    await page.getByPlaceholder("Ask anything").waitFor();
    assert.equal(await paper(), dark);
  });
});

const focused = (page) =>
  page.evaluate(() => document.activeElement?.getAttribute("aria-label") ?? "nothing");
