/** The Cache API over a map, with a quota. */

interface Entry {
  readonly body: ArrayBuffer;
  readonly headers: Headers;
}

export class FakeCaches {
  readonly entries = new Map<string, Map<string, Entry>>();
  num_puts = 0;

  constructor(public quota_bytes = Infinity) {}

  open(name: string): Promise<Cache> {
    const entries = this.entries.get(name) ?? new Map<string, Entry>();
    this.entries.set(name, entries);
    return Promise.resolve(new FakeCache(entries, this) as unknown as Cache);
  }

  get num_bytes(): number {
    const caches = [...this.entries.values()];
    return caches
      .flatMap((cache) => [...cache.values()])
      .reduce((n, e) => n + e.body.byteLength, 0);
  }

  /** URLs of a cache. */
  urls(name: string): string[] {
    return [...(this.entries.get(name)?.keys() ?? [])];
  }

  get storage(): CacheStorage {
    return this as unknown as CacheStorage;
  }
}

class FakeCache {
  constructor(
    private readonly entries: Map<string, Entry>,
    private readonly owner: FakeCaches,
  ) {}

  async put(request: string, response: Response): Promise<void> {
    const body = await response.arrayBuffer();
    if (this.owner.num_bytes + body.byteLength > this.owner.quota_bytes) {
      throw new DOMException("no space", "QuotaExceededError");
    }
    this.owner.num_puts += 1;
    this.entries.set(request, { body, headers: response.headers });
  }

  match(request: string | Request): Promise<Response | undefined> {
    const entry = this.entries.get(typeof request === "string" ? request : request.url);
    return Promise.resolve(entry && new Response(entry.body.slice(0), { headers: entry.headers }));
  }

  delete(request: string | Request): Promise<boolean> {
    return Promise.resolve(
      this.entries.delete(typeof request === "string" ? request : request.url),
    );
  }

  keys(): Promise<Request[]> {
    return Promise.resolve([...this.entries.keys()].map((url) => new Request(url)));
  }
}
