// Headless Chromium with WebGPU on the processor, and a server for its pages.
import fs from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";
import { chromium } from "playwright-core";

/** Flags under which Debian's Chromium offers WebGPU (SwiftShader, float32 only) and calls nobody. */
export const CHROMIUM_FLAGS = [
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

const MEDIA_TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".css": "text/css",
  ".json": "application/json",
  ".wasm": "application/wasm",
};

/** The browser: `$CHROMIUM`, or the first that is on the path. */
export function chromiumPath() {
  const names = ["chromium", "chromium-browser", "google-chrome"];
  const folders = (process.env.PATH ?? "").split(path.delimiter);
  const places = names.flatMap((name) => folders.map((folder) => path.join(folder, name)));
  const found = process.env.CHROMIUM ?? places.find((place) => fs.existsSync(place));
  if (!found) throw new Error("no Chromium is installed; run, as root: apt install chromium");
  return found;
}

/**
 * Starts a browser with a profile of its own, which is deleted when the browser is closed.
 * `profile` names a folder that stays, `flags` are added to CHROMIUM_FLAGS.
 */
export async function openBrowser({ profile, flags = [], ...options } = {}) {
  const folder = profile ?? fs.mkdtempSync(path.join(os.tmpdir(), "everycast-chromium-"));
  const context = await chromium.launchPersistentContext(folder, {
    executablePath: chromiumPath(),
    headless: true,
    args: [...CHROMIUM_FLAGS, ...flags],
    ...options,
  });
  if (profile === undefined) {
    // The browser may write until it has ended, which it has not quite when it says so.
    const rm = { recursive: true, force: true, maxRetries: 20, retryDelay: 100 };
    context.on("close", () => fs.promises.rm(folder, rm).catch(() => {}));
  }
  return context;
}

/**
 * Serves folders on 127.0.0.1: `folders` maps beginnings of URL paths ("/models/a/") to folders.
 * More can be added to the map at any time; the longest that fits is taken. Byte ranges work.
 * Gives `origin`, `close`, and `bytesSent`, a function that says how much went out so far.
 */
export async function serve(folders) {
  let numBytes = 0;
  const server = http.createServer((request, response) => {
    const file = findFile(folders, decodeURIComponent(new URL(request.url, "http://x").pathname));
    const stat = file === undefined ? undefined : fs.statSync(file, { throwIfNoEntry: false });
    if (!stat?.isFile()) {
      response.writeHead(404).end();
      return;
    }
    const range = parseRange(request.headers.range, stat.size);
    if (range === null) {
      response.writeHead(416, { "Content-Range": `bytes */${stat.size}` }).end();
      return;
    }
    const [first, last] = range ?? [0, stat.size - 1];
    const headers = {
      "Content-Type": MEDIA_TYPES[path.extname(file)] ?? "application/octet-stream",
      "Content-Length": last - first + 1,
      "Accept-Ranges": "bytes",
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    };
    if (range) headers["Content-Range"] = `bytes ${first}-${last}/${stat.size}`;
    response.writeHead(range ? 206 : 200, headers);
    if (request.method === "HEAD" || stat.size === 0) {
      response.end();
      return;
    }
    const stream = fs.createReadStream(file, { start: first, end: last });
    stream.on("data", (piece) => (numBytes += piece.length));
    stream.on("error", () => response.destroy());
    stream.pipe(response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    origin: `http://127.0.0.1:${server.address().port}`,
    bytesSent: () => numBytes,
    close: () => {
      server.closeAllConnections();
      return new Promise((resolve) => server.close(resolve));
    },
  };
}

function findFile(folders, urlPath) {
  const fitting = Object.keys(folders).filter((prefix) => urlPath.startsWith(prefix));
  const prefix = fitting.sort((a, b) => b.length - a.length)[0];
  if (prefix === undefined) return undefined;
  const folder = path.resolve(folders[prefix]);
  const file = path.resolve(folder, "." + path.sep + urlPath.slice(prefix.length));
  return file.startsWith(folder + path.sep) ? file : undefined;
}

/** [first, last] of a Range header; undefined without one, null if it cannot be met. */
function parseRange(header, size) {
  if (header === undefined) return undefined;
  const match = /^bytes=(\d*)-(\d*)$/.exec(header);
  if (!match || (match[1] === "" && match[2] === "")) return null;
  const first = match[1] === "" ? Math.max(size - Number(match[2]), 0) : Number(match[1]);
  const last = match[1] === "" || match[2] === "" ? size - 1 : Math.min(Number(match[2]), size - 1);
  return first <= last ? [first, last] : null;
}
