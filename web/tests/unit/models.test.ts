import { afterEach, describe, expect, it, vi } from "vitest";
import { placeFiles, removeModel, removeOldVersions } from "../../src/download/model_cache";
import { RateMeter } from "../../src/download/rate_meter";
import { cachesWithMemory } from "../../src/engine/memory_caches";
import { formatBytes, formatSeconds } from "../../src/format";
import { fetchModels, type ModelRecord, parseModelIndex } from "../../src/models";
import { FakeCaches } from "./fake_caches";

const BASE = "https://host.test/page/";
const file = (path: string) => ({ path, num_bytes: path.length, sha256: "" });
const library = {
  ...file("lib/webgpu.wasm"),
  features: [],
  max_binding_bytes: null,
  min_subgroup_size: null,
  is_for_cpu_adapters: false,
};
const model: ModelRecord = {
  id: "m",
  name: "m",
  base: "models/m/v2/resolve/main/",
  quantization: "q4f32_1",
  bits_per_weight: 4.5,
  num_parameters: 1,
  licence: null,
  context_window_size: 2048,
  largest_tensor_bytes: 1,
  sampling: {},
  files: [file("mlc-chat-config.json"), file("tensor-cache.json"), file("params_shard_0.bin")],
  libraries: [library],
};

afterEach(() => vi.unstubAllGlobals());

describe("the list of models", () => {
  it("is refused in another form or version", () => {
    expect(() => parseModelIndex(null)).toThrow("not a list of models");
    expect(() => parseModelIndex({ format_version: 1, models: [] })).toThrow("format version 1");
    expect(parseModelIndex({ format_version: 2, models: [model] })).toEqual({
      models: [model],
      has_server: false,
    });
  });

  it("is not taken from a start page that answers everything", async () => {
    const page = new Response("<!doctype html>", { headers: { "content-type": "text/html" } });
    vi.stubGlobal("fetch", () => Promise.resolve(page));
    await expect(fetchModels(BASE)).rejects.toThrow("not JSON");
    vi.stubGlobal("fetch", () => Promise.reject(new TypeError("Failed to fetch")));
    await expect(fetchModels(BASE)).rejects.toThrow("cannot be reached");
  });
});

describe("a model's files", () => {
  it("lie where WebLLM looks for them", () => {
    const places = placeFiles(model, library, BASE).map(({ scope, url }) => [scope, url]);
    const folder = "https://host.test/page/models/m/v2/resolve/main/";
    expect(places).toContainEqual(["webllm/config", `${folder}mlc-chat-config.json`]);
    expect(places).toContainEqual(["webllm/model", `${folder}params_shard_0.bin`]);
    expect(places).toContainEqual(["webllm/wasm", `${folder}lib/webgpu.wasm`]);
  });

  it("are removed with all their versions, and no other model's", async () => {
    const caches = new FakeCaches();
    const cache = await caches.open("webllm/model");
    const old = "https://host.test/page/models/m/v1/resolve/main/params_shard_0.bin";
    const current = "https://host.test/page/models/m/v2/resolve/main/params_shard_0.bin";
    const other = "https://host.test/page/models/m2/v1/resolve/main/params_shard_0.bin";
    for (const url of [old, current, other]) await cache.put(url, new Response("x"));
    await removeOldVersions(model, BASE, caches.storage);
    expect(caches.urls("webllm/model")).toEqual([current, other]);
    await removeModel(model, BASE, caches.storage);
    expect(caches.urls("webllm/model")).toEqual([other]);
  });

  it("are answered from memory where they could not be stored", async () => {
    const url = "https://host.test/a";
    const entries = new Map([[url, new TextEncoder().encode("x").buffer as ArrayBuffer]]);
    const caches = cachesWithMemory(entries, new FakeCaches().storage);
    const cache = await caches.open("webllm/model");
    expect(await (await cache.match(new Request(url)))?.text()).toBe("x");
    expect((await cache.keys()).map((request) => request.url)).toEqual([url]);
    await expect(cache.add(new Request("https://host.test/b"))).rejects.toThrow("no file");
  });
});

describe("numbers", () => {
  it("are written for people", () => {
    const sizes = [0, 999, 1000, 84_300_000, 999_600, 4.2e9].map((n) => formatBytes(n));
    expect(sizes.map((size) => size.replace("\u00a0", " "))).toEqual([
      "0 B",
      "999 B",
      "1.00 kB",
      "84.3 MB",
      "1.00 MB",
      "4.20 GB",
    ]);
    const times = [2, 43, 200, 4800].map((s) => formatSeconds(s).replaceAll("\u00a0", " "));
    expect(times).toEqual(["less than 5 s", "45 s", "3 min", "1 h 20 min"]);
  });

  it("of a rate are those of the last seconds", () => {
    const meter = new RateMeter();
    expect(meter.bytes_per_s).toBeNull();
    for (let second = 0; second <= 20; second += 1) meter.add(second * 100, second);
    expect(meter.bytes_per_s).toBe(100);
    expect(meter.secondsLeft(500)).toBe(5);
    meter.add(0, 21); // a file began again
    expect(meter.bytes_per_s).toBeNull();
  });
});
