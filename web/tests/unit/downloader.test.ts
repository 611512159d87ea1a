import { beforeEach, describe, expect, it } from "vitest";
import { type DownloadProgress, downloadFiles } from "../../src/download/downloader";
import { DownloadError } from "../../src/download/errors";
import {
  CHECKED_HEADER,
  isStored,
  PARTIAL_CACHE,
  type PlacedFile,
} from "../../src/download/model_cache";
import { FakeCaches } from "./fake_caches";
import { FakeHost, place } from "./fake_host";

const URL_BASE = "https://host.test/models/m/v1/resolve/main/";
const SHARD = `${URL_BASE}params_shard_0.bin`;
const data = Uint8Array.from({ length: 1000 }, (_, i) => (i * 7) & 255);

let caches: FakeCaches;
let host: FakeHost;
let shard: PlacedFile;
let progress: DownloadProgress[];

beforeEach(() => {
  caches = new FakeCaches();
  host = new FakeHost(new Map([[SHARD, data]]));
  shard = place(SHARD, data, "webllm/model");
  progress = [];
});

function download(
  options: { keep?: "cache" | "memory"; signal?: AbortSignal; isThorough?: boolean } = {},
  files = [shard],
): Promise<ReadonlyMap<string, ArrayBuffer>> {
  return downloadFiles(files, {
    storage: caches.storage,
    keep: options.keep ?? "cache",
    signal: options.signal ?? new AbortController().signal,
    isThorough: options.isThorough ?? false,
    onProgress: (event) => progress.push(event),
    fetch: host.fetch,
    sleep: () => Promise.resolve(),
  });
}

async function stored(): Promise<Uint8Array | null> {
  const response = await (await caches.storage.open("webllm/model")).match(SHARD);
  return response === undefined ? null : new Uint8Array(await response.arrayBuffer());
}

async function kindOf(promise: Promise<unknown>): Promise<string> {
  const error: unknown = await promise.then(
    () => null,
    (reason: unknown) => reason,
  );
  expect(error).toBeInstanceOf(DownloadError);
  return (error as DownloadError).kind;
}

describe("a download", () => {
  it("stores a file under WebLLM's URL, marked with the hash that was checked", async () => {
    await download();
    expect(await stored()).toEqual(data);
    const response = await (await caches.storage.open("webllm/model")).match(SHARD);
    expect(response?.headers.get(CHECKED_HEADER)).toBe(shard.sha256);
    expect(progress.at(-1)).toEqual({ done_bytes: 1000, total_bytes: 1000, kept_bytes: 0 });
    expect(caches.urls(PARTIAL_CACHE)).toEqual([]);
  });

  it("asks for nothing that is stored", async () => {
    await download();
    await download();
    expect(host.requests).toHaveLength(1);
    expect(progress.at(-1)?.kept_bytes).toBe(1000);
  });

  it("goes on where the connection broke", async () => {
    host.faults.push({ kind: "cut" });
    await download();
    expect(host.requests.map((request) => request.range)).toEqual([null, "bytes=500-"]);
    expect(await stored()).toEqual(data);
  });

  it("goes on in a later visit", async () => {
    const stop = new AbortController();
    host.faults.push({ kind: "cut" });
    const first = downloadFiles([shard], {
      storage: caches.storage,
      keep: "cache",
      signal: stop.signal,
      onProgress: () => undefined,
      fetch: host.fetch,
      sleep: () => {
        stop.abort(new DOMException("closed", "AbortError"));
        return Promise.reject(stop.signal.reason as Error);
      },
    });
    await expect(first).rejects.toThrow("closed");
    expect(await stored()).toBeNull();
    await download();
    expect(host.requests.at(-1)?.range).toBe("bytes=500-");
    expect(progress.at(-1)).toEqual({ done_bytes: 1000, total_bytes: 1000, kept_bytes: 500 });
    expect(await stored()).toEqual(data);
  });

  it("starts again if the file changed meanwhile: If-Range fails", async () => {
    host.faults.push({ kind: "cut" }, { kind: "new_version" });
    await download();
    expect(await stored()).toEqual(data);
  });

  it("starts again where the host ignores ranges", async () => {
    host.faults.push({ kind: "cut" }, { kind: "ignores_range" });
    await download();
    expect(await stored()).toEqual(data);
  });

  it("fetches again what arrived damaged, from the start", async () => {
    host.faults.push({ kind: "corrupt" });
    await download();
    expect(host.requests.map((request) => request.range)).toEqual([null, null]);
    expect(await stored()).toEqual(data);
  });

  it("gives up on a file that is damaged twice, and stores nothing", async () => {
    host.faults.push({ kind: "corrupt" }, { kind: "corrupt" });
    expect(await kindOf(download())).toBe("hash");
    expect(await stored()).toBeNull();
    expect(caches.num_bytes).toBe(0);
  });

  it("repairs a hash that only the joining of two halves broke", async () => {
    host.faults.push({ kind: "cut" }, { kind: "corrupt" });
    await download();
    expect(host.requests.map((request) => request.range)).toEqual([null, "bytes=500-", null]);
    expect(await stored()).toEqual(data);
  });

  it.each([
    [{ kind: "html" } as const, "html"],
    [{ kind: "status", status: 404 } as const, "missing"],
    [{ kind: "status", status: 403 } as const, "missing"],
  ])("takes %j for what it is: %s", async (fault, kind) => {
    host.faults.push(fault);
    expect(await kindOf(download())).toBe(kind);
    expect(caches.num_bytes).toBe(0);
    expect(host.requests).toHaveLength(1);
  });

  it("waits out a host that fails for a while", async () => {
    host.faults.push(
      { kind: "status", status: 503 },
      { kind: "network" },
      { kind: "status", status: 429 },
    );
    await download();
    expect(await stored()).toEqual(data);
  });

  it("gives up on a host that keeps failing, and on a network that is gone", async () => {
    for (let i = 0; i < 5; i += 1) host.faults.push({ kind: "status", status: 503 });
    expect(await kindOf(download())).toBe("server");
    for (let i = 0; i < 5; i += 1) host.faults.push({ kind: "network" });
    expect(await kindOf(download())).toBe("cut");
  });

  it("refuses a file of another size before reading it", async () => {
    const other = { ...shard, num_bytes: 900 };
    expect(await kindOf(download({}, [other]))).toBe("size");
    expect(caches.num_bytes).toBe(0);
  });

  it("says that the quota is used up, and keeps nothing half", async () => {
    caches.quota_bytes = 800;
    expect(await kindOf(download())).toBe("quota");
    expect(await stored()).toBeNull();
  });

  it("runs from memory where nothing can be stored", async () => {
    caches.quota_bytes = 0;
    const in_memory = await download({ keep: "memory" });
    expect(new Uint8Array(in_memory.get(SHARD) ?? new ArrayBuffer(0))).toEqual(data);
    expect(caches.num_bytes).toBe(0);
  });

  it("stops the other files when one fails for good, and keeps those that are whole", async () => {
    const names = ["a", "b", "c", "d", "e"].map((name) => `${URL_BASE}${name}`);
    host = new FakeHost(new Map(names.slice(1).map((name) => [name, data])));
    const files = names.map((name) => place(name, data, "webllm/model"));
    expect(await kindOf(download({}, files))).toBe("missing");
    expect(host.requests.length).toBeLessThan(5);
  });
});

describe("what is stored already", () => {
  async function poison(body: BodyInit, headers: Record<string, string> = {}): Promise<void> {
    await (await caches.storage.open("webllm/model")).put(SHARD, new Response(body, { headers }));
  }

  it.each([
    ["an error page", "<!doctype html>"],
    ["other bytes of the right length", data.map((byte) => byte ^ 1)],
    ["half of the file", data.slice(0, 500)],
  ])("is replaced if it is %s", async (_, body) => {
    await poison(body);
    await download();
    expect(await stored()).toEqual(data);
  });

  it("is replaced if it was cut after it was marked", async () => {
    await poison(data.slice(0, 10), { [CHECKED_HEADER]: shard.sha256 });
    await download();
    expect(await stored()).toEqual(data);
  });

  it("is kept if another program stored the right bytes", async () => {
    await poison(data);
    await download();
    expect(host.requests).toHaveLength(0);
  });

  it("is hashed in spite of its mark when that is asked for", async () => {
    await poison(
      data.map((byte) => byte ^ 1),
      { [CHECKED_HEADER]: shard.sha256 },
    );
    await download({ isThorough: true });
    expect(await stored()).toEqual(data);
  });

  it("is deleted when it is found to be wrong", async () => {
    await poison("<!doctype html>");
    expect(await isStored(shard, caches.storage)).toBe(false);
    expect(caches.urls("webllm/model")).toEqual([]);
  });
});
