// Lets a program in another language drive pages: one JSON object a line in, one out.
//
//   {"id": 1, "method": "serve", "prefix": "/models/a/", "folder": "/…"}
//   {"id": 2, "method": "open", "page": "a", "path": "/tests/engine_page.html"}
//   {"id": 3, "method": "call", "page": "a", "name": "load", "argument": {…}}
//   {"id": 4, "method": "close", "page": "a"}
//
// Each is answered by {"id": …, "result": …} or {"id": …, "error": "…"}. Ends with its input.
import path from "node:path";
import readline from "node:readline";
import { fileURLToPath } from "node:url";
import { openBrowser, serve } from "./browser.mjs";

const web = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const folders = {
  "/node_modules/": path.join(web, "node_modules"),
  "/tests/": path.join(web, "tests"),
};
const server = await serve(folders);
const browser = await openBrowser();
const pages = new Map();

const methods = {
  serve({ prefix, folder }) {
    folders[prefix] = folder;
    return null;
  },
  bytes_sent() {
    return server.bytesSent();
  },
  async open({ page: name, path: where }) {
    const page = await browser.newPage();
    pages.set(name, page);
    page.on("console", (message) => {
      if (message.type() === "error") console.error(`${name}: ${message.text()}`);
    });
    page.on("pageerror", (error) => console.error(`${name}: ${error.stack ?? error}`));
    await page.goto(server.origin + where);
    await page.waitForFunction(() => window.calls !== undefined);
    return null;
  },
  call({ page, name, argument }) {
    return pages
      .get(page)
      .evaluate(([call, value]) => window.calls[call](value), [name, argument]);
  },
  async close({ page }) {
    await pages.get(page).close();
    pages.delete(page);
    return null;
  },
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { id, method, ...argument } = JSON.parse(line);
  Promise.resolve()
    .then(() => methods[method](argument))
    .then(
      (result) => ({ id, result: result ?? null }),
      (error) => ({ id, error: String(error.stack ?? error) }),
    )
    .then((answer) => process.stdout.write(JSON.stringify(answer) + "\n"));
}
await browser.close();
await server.close();
