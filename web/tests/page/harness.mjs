// A host with faults and a browser, for the tests of the page.
//
// The host serves the page (built with the mock engine) and a tiny made-up model; `host.faults`
// says, by file name, what goes wrong with the next requests.

import { createHash, randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import http from "node:http";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { openBrowser as launch } from "../browser.mjs";

const WEB = fileURLToPath(new URL("../..", import.meta.url));
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".css": "text/css",
  ".json": "application/json",
  ".wasm": "application/wasm",
  ".svg": "image/svg+xml",
  ".webmanifest": "application/manifest+json",
};
export const HEADERS = {
  "Content-Security-Policy":
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; " +
    "img-src 'self' data:; connect-src 'self'; worker-src 'self'; manifest-src 'self'; " +
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Opener-Policy": "same-origin",
};

/** @param {Buffer} data */
const sha256 = (data) => createHash("sha256").update(data).digest("hex");

/** A model of a few shards, each beginning with the byte that the mock engine looks for. */
export function makeModel(
  id,
  {
    num_shards = 3,
    shard_bytes = 200_000,
    version = "v1",
    num_parameters = 134_515_008,
    libraries,
  } = {},
) {
  const files = new Map();
  const records = [];
  for (let i = 0; i < num_shards; i += 1) {
    const data = randomBytes(shard_bytes);
    data[0] = 0x45;
    files.set(`params_shard_${i}.bin`, data);
    records.push({ dataPath: `params_shard_${i}.bin`, nbytes: shard_bytes, records: [] });
  }
  files.set("tensor-cache.json", Buffer.from(JSON.stringify({ metadata: {}, records })));
  files.set("mlc-chat-config.json", Buffer.from(JSON.stringify({ tokenizer_files: [] })));
  files.set("tokenizer.json", Buffer.from("{}"));
  const described = libraries ?? [
    { path: "lib/webgpu.wasm", features: [] },
    { path: "lib/webgpu-f16.wasm", features: ["shader-f16"] },
  ];
  const describe = (name) => {
    const data = files.get(name);
    return { path: name, num_bytes: data.length, sha256: sha256(data) };
  };
  const record = {
    id,
    name: id,
    base: `models/${id}/${version}/resolve/main/`,
    quantization: "q4f32_1",
    bits_per_weight: 4.5,
    num_parameters,
    licence: "apache-2.0",
    context_window_size: 8192,
    largest_tensor_bytes: shard_bytes,
    sampling: { temperature: 0.7, top_p: 0.95 },
    files: [...files.keys()].map(describe),
    libraries: [],
  };
  for (const library of described) {
    files.set(library.path, randomBytes(1000));
    const rest = {
      max_binding_bytes: null,
      min_subgroup_size: null,
      is_for_cpu_adapters: false,
    };
    record.libraries.push({ ...describe(library.path), ...rest, ...library });
  }
  return { record, files };
}

/** Serves the page at `url`. `faults.get(file name)` is a list of faults, the next one first. */
export async function startHost({ models = [makeModel("tiny")], page = "dist-mock" } = {}) {
  const faults = new Map();
  const requests = [];
  const host = { faults, requests, models, is_offline: false, completions: null };
  const server = http.createServer(async (request, response) => {
    if (host.is_offline) return request.socket.destroy();
    const name = decodeURIComponent(new URL(request.url, "http://host").pathname.slice(1));
    requests.push({ name, range: request.headers.range ?? null });
    if (name.startsWith("v1/")) return answerApi(host, name, request, response);
    const data = await find(host, name, page);
    if (data === null) {
      response.writeHead(404, { "content-type": "application/json", ...HEADERS });
      return response.end('{"error": {"message": "no such file"}}');
    }
    send(request, response, name, data, faults.get(path.basename(name))?.shift());
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  host.url = `http://127.0.0.1:${server.address().port}/`;
  host.close = () => {
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  return host;
}

async function find(host, name, page) {
  if (name === "models.json") {
    return Buffer.from(
      JSON.stringify({ format_version: 2, models: host.models.map((model) => model.record) }),
    );
  }
  for (const { record, files } of host.models) {
    if (name.startsWith(record.base)) return files.get(name.slice(record.base.length)) ?? null;
  }
  try {
    return await readFile(path.join(WEB, page, name === "" ? "index.html" : name));
  } catch {
    return null;
  }
}

/** faults: "html", "404", "503", "corrupt", "cut" (after half of the body), "slow". */
function send(request, response, name, data, fault) {
  const headers = {
    ...HEADERS,
    "content-type": TYPES[path.extname(name || "index.html")] ?? "application/octet-stream",
    "cache-control": "no-cache",
    "accept-ranges": "bytes",
    etag: `"${sha256(data).slice(0, 16)}"`,
  };
  if (fault === "html") {
    response.writeHead(200, { ...HEADERS, "content-type": "text/html" });
    return response.end("<!doctype html><title>Sign in</title>");
  }
  if (fault === "404" || fault === "503") {
    response.writeHead(Number(fault), HEADERS);
    return response.end();
  }
  let body = data;
  let status = 200;
  const range = /^bytes=(\d+)-$/.exec(request.headers.range ?? "");
  if (range !== null && request.headers["if-range"] === headers.etag) {
    const start = Number(range[1]);
    status = 206;
    body = data.subarray(start);
    headers["content-range"] = `bytes ${start}-${data.length - 1}/${data.length}`;
  }
  if (fault === "corrupt") body = Buffer.from(body.map((byte) => byte ^ 1));
  response.writeHead(status, { ...headers, "content-length": body.length });
  if (request.method === "HEAD") return response.end();
  if (fault === "cut") {
    return response.write(body.subarray(0, body.length >> 1), () =>
      setTimeout(() => response.destroy(), 50),
    );
  }
  if (fault === "slow") return trickle(response, body);
  return response.end(body);
}

function trickle(response, body) {
  const step = Math.ceil(body.length / 40);
  let sent = 0;
  const timer = setInterval(() => {
    if (sent >= body.length || response.destroyed) {
      clearInterval(timer);
      return response.end();
    }
    response.write(body.subarray(sent, sent + step));
    sent += step;
  }, 50);
}

/** OpenAI's routes, where `host.completions` is the text of every answer. */
async function answerApi(host, name, request, response) {
  if (host.completions === null) {
    response.writeHead(404, { "content-type": "application/json" });
    return response.end('{"error": {"message": "no such route"}}');
  }
  if (name === "v1/models") {
    response.writeHead(200, { "content-type": "application/json" });
    return response.end(JSON.stringify({ object: "list", data: [{ id: "served-model" }] }));
  }
  for await (const _ of request);
  response.writeHead(200, { "content-type": "text/event-stream" });
  for (const word of host.completions.split(/(?<= )/)) {
    const choice = { index: 0, delta: { content: word }, finish_reason: null };
    response.write(`data: ${JSON.stringify({ choices: [choice] })}\n\n`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  const usage = { prompt_tokens: 3, completion_tokens: 4 };
  response.write(`data: ${JSON.stringify({ choices: [], usage })}\n\n`);
  return response.end("data: [DONE]\n\n");
}

/** A browser with a profile of its own. `options` are those of ../browser.mjs. */
export async function openBrowser(options = {}) {
  const profile = mkdtempSync(path.join(tmpdir(), "everycast-chromium-"));
  const context = await launch({ profile, ...options });
  context.setDefaultTimeout(15_000);
  return {
    context,
    profile,
    close: async () => {
      await context.close();
      rmSync(profile, { recursive: true, force: true, maxRetries: 3 });
    },
  };
}

const START = /^(Download .*|Start|Go on and start)$/;

/** The button that downloads what is missing and starts the model. */
export function startButton(page) {
  return page.getByRole("button", { name: START });
}

/** Opens the page and waits until it can be asked; downloads the model if it is not stored. */
export async function openReady(context, host) {
  const page = await openPage(context, host);
  const ready = page.getByPlaceholder("Ask anything");
  await startButton(page).or(ready).waitFor();
  if (await startButton(page).isVisible()) await startButton(page).click();
  await ready.waitFor();
  return page;
}

export async function openPage(context, host) {
  const page = await context.newPage();
  page.faults = [];
  page.on("pageerror", (error) => page.faults.push(String(error)));
  page.on("console", (message) => {
    if (/Content Security Policy|violates/.test(message.text())) page.faults.push(message.text());
  });
  await page.goto(host.url);
  return page;
}

/** Asks, and gives the answer's text once it is complete. */
export async function ask(page, question) {
  const before = await page.locator(".answer:not(.growing)").count();
  await page.getByLabel("Your question").fill(question);
  await page.keyboard.press("Enter");
  await page.locator(".answer:not(.growing)").nth(before).waitFor();
  return answerText(page, before);
}

export function answerText(page, index) {
  return page.locator(".answer:not(.growing) .markdown").nth(index).innerText();
}

/** Ends the GPU process of the browser that uses this profile: every WebGPU device is lost. */
export function killGpuProcess(profile) {
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    let command;
    try {
      command = readFileSync(`/proc/${pid}/cmdline`, "utf8");
    } catch {
      continue;
    }
    if (command.includes("--type=gpu-process") && command.includes(profile)) {
      process.kill(Number(pid), "SIGKILL");
      return;
    }
  }
  throw new Error("the browser has no GPU process");
}
