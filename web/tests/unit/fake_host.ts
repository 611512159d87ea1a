/** A host of files whose next answers can be scripted, as `fetch` sees it. */

import { createHash } from "node:crypto";
import type { PlacedFile } from "../../src/download/model_cache";

export type Fault =
  | { readonly kind: "html" | "cut" | "corrupt" | "network" | "ignores_range" | "new_version" }
  | { readonly kind: "status"; readonly status: number };

export class FakeHost {
  readonly requests: { readonly url: string; readonly range: string | null }[] = [];
  readonly faults: Fault[] = [];
  private etag = '"one"';

  constructor(private readonly files: ReadonlyMap<string, Uint8Array<ArrayBuffer>>) {}

  readonly fetch = ((input: string, init: RequestInit = {}): Promise<Response> => {
    const headers = new Headers(init.headers);
    this.requests.push({ url: input, range: headers.get("range") });
    return this.answer(input, headers);
  }) as typeof fetch;

  private async answer(url: string, asked: Headers): Promise<Response> {
    const fault = this.faults.shift();
    const data = this.files.get(url);
    if (data === undefined) return new Response("", { status: 404 });
    switch (fault?.kind) {
      case "network":
        throw new TypeError("Failed to fetch");
      case "status":
        return new Response("", { status: fault.status });
      case "html":
        return new Response("<!doctype html>", { headers: { "content-type": "text/html" } });
      case "new_version":
        this.etag = '"two"';
    }
    const match = /^bytes=(\d+)-$/.exec(asked.get("range") ?? "");
    const is_range =
      match !== null && asked.get("if-range") === this.etag && fault?.kind !== "ignores_range";
    const start = is_range ? Number(match[1]) : 0;
    let body = data.slice(start);
    if (fault?.kind === "corrupt") body = body.map((byte) => byte ^ 1);
    const headers: Record<string, string> = { etag: this.etag, "content-length": `${body.length}` };
    if (is_range) {
      headers["content-range"] = `bytes ${start}-${data.length - 1}/${data.length}`;
    }
    const stream = fault?.kind === "cut" ? cutStream(body) : new Blob([body]).stream();
    return new Response(stream, { status: is_range ? 206 : 200, headers });
  }
}

function cutStream(body: Uint8Array): ReadableStream<Uint8Array> {
  let is_sent = false;
  return new ReadableStream({
    pull(controller) {
      if (is_sent) {
        controller.error(new TypeError("network error"));
      } else {
        controller.enqueue(body.slice(0, body.length >> 1));
        is_sent = true;
      }
    },
  });
}

export function place(url: string, data: Uint8Array, scope: PlacedFile["scope"]): PlacedFile {
  const sha256 = createHash("sha256").update(data).digest("hex");
  return { url, scope, num_bytes: data.length, sha256 };
}
