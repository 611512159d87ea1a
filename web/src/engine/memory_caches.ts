/** The Cache API, with some entries in memory: for a model that the browser has no space for.
 *
 * WebLLM finds its files by `caches.open(scope)` and `cache.match(request)`. In memory mode the
 * worker's `caches` is this: what was downloaded is answered from memory, the rest as before.
 */

export function cachesWithMemory(
  entries: ReadonlyMap<string, ArrayBuffer>,
  storage: CacheStorage,
): Pick<CacheStorage, "open"> {
  return {
    open: async (name) => {
      const stored = await storage.open(name).catch(() => null);
      return new MemoryCache(entries, stored) as unknown as Cache;
    },
  };
}

/** As much of Cache as WebLLM calls. */
class MemoryCache implements Pick<Cache, "match" | "keys" | "add" | "delete"> {
  constructor(
    private readonly entries: ReadonlyMap<string, ArrayBuffer>,
    private readonly stored: Cache | null,
  ) {}

  async match(request: RequestInfo | URL): Promise<Response | undefined> {
    const entry = this.entries.get(urlOf(request));
    return entry === undefined ? this.stored?.match(request) : new Response(entry);
  }

  async keys(): Promise<readonly Request[]> {
    const in_memory = [...this.entries.keys()].map((url) => new Request(url));
    return [...in_memory, ...((await this.stored?.keys()) ?? [])];
  }

  /** Everything a model needs was brought before; another request would go unchecked. */
  add(request: RequestInfo | URL): Promise<void> {
    return Promise.reject(new Error(`${urlOf(request)} is no file of the model`));
  }

  delete(): Promise<boolean> {
    return Promise.resolve(false);
  }
}

function urlOf(request: RequestInfo | URL): string {
  return request instanceof Request ? request.url : String(request);
}
