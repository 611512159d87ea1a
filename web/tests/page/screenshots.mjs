// Makes docs/images/web-*.png: node web/tests/page/screenshots.mjs (after the mock build).

import { fileURLToPath } from "node:url";
import { ask, makeModel, openBrowser, openPage, startButton, startHost } from "./harness.mjs";

const IMAGES = fileURLToPath(new URL("../../../docs/images/", import.meta.url));
const DESK = { width: 1120, height: 720 };
const PHONE = { width: 390, height: 780 };

const host = await startHost({
  models: [
    makeModel("SmolLM2 135M Instruct", { shard_bytes: 12_000_000 }),
    makeModel("Qwen2.5 0.5B Instruct", { num_parameters: 494_032_768 }),
  ],
});
const browser = await openBrowser();
const page = await openPage(browser.context, host);

const shoot = async (name) => {
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
    for (const [size, viewport] of [
      ["", DESK],
      ["-phone", PHONE],
    ]) {
      await page.setViewportSize(viewport);
      await page.waitForTimeout(200);
      await page.screenshot({ path: `${IMAGES}web-${name}-${colorScheme}${size}.png` });
    }
  }
  await page.setViewportSize(DESK);
};

await startButton(page).waitFor();
await shoot("setup");
await startButton(page).click();
await page.getByPlaceholder("Ask anything").waitFor();
for (const title of ["Why is the sky blue?", "A name for a boat", "Three soups for winter"]) {
  await ask(page, title);
  await page.getByRole("button", { name: "New chat" }).click();
}
await ask(page, "When are the tides highest?");
await page.locator(".log").evaluate((log) => log.scrollTo({ top: 0 }));
await shoot("chat");
await browser.close();
await host.close();
