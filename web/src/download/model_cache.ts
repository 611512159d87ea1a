/** The caches that WebLLM reads: which file lies where, which are there and whole.
 *
 * WebLLM asks the Cache API by absolute URL in three caches and believes whatever it finds, so
 * nothing but checked files may ever be in them.
 */

import type { LibraryRecord, ModelRecord } from "../models";

/** Names are those of WebLLM 0.2.86 (`reloadInternal` and `asyncLoadTokenizer`). */
export type CacheScope = "webllm/config" | "webllm/model" | "webllm/wasm";
export const CACHE_SCOPES: readonly CacheScope[] = ["webllm/config", "webllm/model", "webllm/wasm"];
export const PARTIAL_CACHE = "everycast/partial";
/** On stored responses: the hash that was checked before they were stored. */
export const CHECKED_HEADER = "x-everycast-sha256";

export interface PlacedFile {
  readonly url: string;
  readonly scope: CacheScope;
  readonly num_bytes: number;
  readonly sha256: string;
}

/** The absolute URL of a model's folder. */
export function modelUrl(model: ModelRecord, base: string): string {
  return new URL(model.base, base).href;
}

/** All that running `model` with `library` needs, small files first. */
export function placeFiles(
  model: ModelRecord,
  library: LibraryRecord,
  base: string,
): readonly PlacedFile[] {
  const folder = modelUrl(model, base);
  const scopeOf = (path: string): CacheScope =>
    path === library.path
      ? "webllm/wasm"
      : path === "mlc-chat-config.json"
        ? "webllm/config"
        : "webllm/model";
  return [...model.files, library]
    .map((file) => ({
      url: new URL(file.path, folder).href,
      scope: scopeOf(file.path),
      num_bytes: file.num_bytes,
      sha256: file.sha256,
    }))
    .sort((a, b) => a.num_bytes - b.num_bytes);
}

/** Whether a file is in its cache, whole and checked. One that is not ours to trust, such as an
 * error page that another program put there, is hashed; what is wrong is deleted.
 *
 * isThorough: hash it in any case. */
export async function isStored(
  file: PlacedFile,
  storage: CacheStorage,
  isThorough = false,
): Promise<boolean> {
  const cache = await storage.open(file.scope);
  const response = await cache.match(file.url);
  if (response === undefined) return false;
  // A blob is only a reference to the stored bytes: its size costs no reading.
  const blob = await response.blob();
  if (blob.size === file.num_bytes) {
    const isOurs = response.headers.get(CHECKED_HEADER) === file.sha256;
    if (isOurs && !isThorough) return true;
    if ((await sha256(await blob.arrayBuffer())) === file.sha256) {
      return true;
    }
  }
  await cache.delete(file.url);
  return false;
}

/** Bytes of `files` that are stored, whole or in part. */
export async function storedBytes(
  files: readonly PlacedFile[],
  storage: CacheStorage,
): Promise<number> {
  const sizes = await Promise.all(
    files.map(async (file) => ((await isStored(file, storage)) ? file.num_bytes : 0)),
  );
  return sizes.reduce((sum, size) => sum + size, 0);
}

/** Deletes every stored byte of a model, of all its versions. */
export async function removeModel(
  model: ModelRecord,
  base: string,
  storage: CacheStorage,
): Promise<void> {
  await deleteWhere(storage, [...CACHE_SCOPES, PARTIAL_CACHE], (url) =>
    url.startsWith(versionsUrl(model, base)),
  );
}

/** Deletes what is left of a model's earlier versions: nothing will ask for it again. */
export async function removeOldVersions(
  model: ModelRecord,
  base: string,
  storage: CacheStorage,
): Promise<void> {
  const current = modelUrl(model, base);
  await deleteWhere(
    storage,
    [...CACHE_SCOPES, PARTIAL_CACHE],
    (url) => url.startsWith(versionsUrl(model, base)) && !url.startsWith(current),
  );
}

/** `base` is `models/<id>/<version>/resolve/main/`: the folder of all versions. */
function versionsUrl(model: ModelRecord, base: string): string {
  return new URL("../../../", modelUrl(model, base)).href;
}

async function deleteWhere(
  storage: CacheStorage,
  names: readonly string[],
  isUnwanted: (url: string) => boolean,
): Promise<void> {
  for (const name of names) {
    const cache = await storage.open(name);
    for (const request of await cache.keys()) {
      if (isUnwanted(request.url)) await cache.delete(request);
    }
  }
}

/** Lower-case hexadecimal SHA-256. */
export async function sha256(data: ArrayBuffer): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
