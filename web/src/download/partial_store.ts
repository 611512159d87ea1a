/** Pieces of files that have not arrived whole, so that a later attempt goes on where one broke.
 *
 * A piece is an entry `<url>?everycast-part=<start>` of a cache of our own, with the entity tag it
 * came under: pieces of two versions of a file are never joined.
 */

import { PARTIAL_CACHE } from "./model_cache";

const START = "everycast-part";
const ETAG_HEADER = "x-everycast-etag";

export interface Partial {
  /** The entity tag of what was read; null if there was nothing. */
  readonly etag: string | null;
  readonly num_bytes: number;
}

export class PartialStore {
  constructor(private readonly storage: CacheStorage) {}

  /** Adds a piece that begins at byte `start`. Never throws: a piece that cannot be kept costs
   * only that it is downloaded again. */
  async append(url: string, etag: string, start: number, bytes: BlobPart): Promise<void> {
    try {
      const cache = await this.storage.open(PARTIAL_CACHE);
      const response = new Response(new Blob([bytes]), { headers: { [ETAG_HEADER]: etag } });
      await cache.put(pieceUrl(url, start), response);
    } catch {
      // No space, or no storage: see above.
    }
  }

  /** Fills `data` with the pieces that follow each other from byte 0 under one entity tag. */
  async read(url: string, data: Uint8Array): Promise<Partial> {
    let etag: string | null = null;
    let end = 0;
    try {
      const cache = await this.storage.open(PARTIAL_CACHE);
      for (;;) {
        const response = await cache.match(pieceUrl(url, end));
        const tag = response?.headers.get(ETAG_HEADER) ?? null;
        if (response === undefined || tag === null || (etag !== null && tag !== etag)) break;
        const piece = new Uint8Array(await response.arrayBuffer());
        if (piece.length === 0 || end + piece.length > data.length) break;
        data.set(piece, end);
        etag = tag;
        end += piece.length;
      }
    } catch {
      // What could not be read is downloaded again.
    }
    return { etag, num_bytes: end };
  }

  async remove(url: string): Promise<void> {
    try {
      const cache = await this.storage.open(PARTIAL_CACHE);
      for (const request of await cache.keys()) {
        if (request.url.startsWith(pieceUrl(url))) await cache.delete(request);
      }
    } catch {
      // No storage: nothing to remove.
    }
  }
}

function pieceUrl(url: string, start?: number): string {
  return `${url}?${START}=${start ?? ""}`;
}
