import { afterEach, describe, expect, it, vi } from "vitest";
import { findServer, readEvents, ServerEngine } from "../../src/engine/server_engine";
import { DEFAULT_SETTINGS } from "../../src/settings";

const BASE = "https://host.test/";
const request = {
  messages: [{ role: "user", content: "hi" }] as const,
  sampling: DEFAULT_SETTINGS.sampling,
};

function streamOf(...pieces: string[]): ReadableStream<Uint8Array> {
  return new Blob(pieces).stream() as ReadableStream<Uint8Array>;
}

function chunk(content: string, finish_reason: string | null = null): string {
  return `data: ${JSON.stringify({ choices: [{ delta: { content }, finish_reason }] })}\n\n`;
}

afterEach(() => vi.unstubAllGlobals());

describe("the server", () => {
  it("is found by its list of models, and nowhere else", async () => {
    const answers = [
      Response.json({ data: [{ id: "served" }] }),
      new Response("<!doctype html>", { headers: { "content-type": "text/html" } }),
      new Response("", { status: 404 }),
    ];
    vi.stubGlobal("fetch", () => Promise.resolve(answers.shift()));
    expect(await findServer(BASE)).toBe("served");
    expect(await findServer(BASE)).toBeNull();
    expect(await findServer(BASE)).toBeNull();
    vi.stubGlobal("fetch", () => Promise.reject(new TypeError("offline")));
    expect(await findServer(BASE)).toBeNull();
  });

  it("streams an answer, cut anywhere between its bytes", async () => {
    const text = `${chunk("Grüß ")}${chunk("Gott", "length")}data: [DONE]\n\n`;
    const bytes = new TextEncoder().encode(text);
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
        controller.close();
      },
    });
    vi.stubGlobal("fetch", () => Promise.resolve(new Response(body)));
    const deltas: string[] = [];
    const engine = new ServerEngine(BASE, "served");
    const outcome = await engine.chat(request, (d) => deltas.push(d), new AbortController().signal);
    expect(deltas.join("")).toBe("Grüß Gott");
    expect(outcome.finish_reason).toBe("length");
  });

  it("passes on what the server refuses", async () => {
    const refused = Response.json({ error: { message: "too long" } }, { status: 400 });
    vi.stubGlobal("fetch", () => Promise.resolve(refused));
    const engine = new ServerEngine(BASE, "served");
    const answer = engine.chat(request, () => undefined, new AbortController().signal);
    await expect(answer).rejects.toThrow("too long");
  });

  it("does not take a broken stream for a whole answer", async () => {
    const read = async (): Promise<void> => {
      for await (const event of readEvents(streamOf(chunk("a")))) void event;
    };
    await expect(read()).rejects.toThrow("broke off");
  });
});
