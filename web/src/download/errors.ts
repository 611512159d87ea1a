/** What can go wrong with a download, and what the person can do about it. */

import { formatBytes } from "../format";

export type DownloadErrorKind =
  | "missing" // 404, 403: the host does not have the file
  | "html" // a web page came instead of the file
  | "size" // the host has a file of another size
  | "hash" // the right number of wrong bytes
  | "cut" // the connection broke again and again
  | "server" // 5xx
  | "quota" // the browser refuses to store more
  | "storage"; // it cannot store at all

export class DownloadError extends Error {
  override readonly name = "DownloadError";

  constructor(
    readonly kind: DownloadErrorKind,
    message: string,
  ) {
    super(message);
  }
}

export function missingError(url: string, status: number): DownloadError {
  return new DownloadError(
    "missing",
    `The host answered ${status} for ${fileName(url)}. It may have published a newer version: ` +
      "reload the page, then try again.",
  );
}

export function htmlError(url: string): DownloadError {
  return new DownloadError(
    "html",
    `A web page came instead of ${fileName(url)}: perhaps a sign-in page of this network, or a ` +
      "host that answers everything with its start page. Nothing of it was stored.",
  );
}

export function sizeError(url: string, expected: number, actual: number): DownloadError {
  return new DownloadError(
    "size",
    `The host's ${fileName(url)} has ${actual} bytes instead of ${expected}: it is not the file ` +
      "that this page was published with. Nothing of it was stored.",
  );
}

export function hashError(url: string): DownloadError {
  return new DownloadError(
    "hash",
    `${fileName(url)} arrived with wrong contents, twice (its SHA-256 does not match). ` +
      "Nothing of it was stored; something between you and the host changes files.",
  );
}

export function cutError(url: string, received: number, total: number): DownloadError {
  return new DownloadError(
    "cut",
    `The connection broke at ${formatBytes(received)} of ${formatBytes(total)} of ` +
      `${fileName(url)}, and trying again did not help. What arrived is kept: going on starts there.`,
  );
}

export function serverError(url: string, status: number): DownloadError {
  return new DownloadError(
    "server",
    `The host failed (${status}) on ${fileName(url)}, again and again. Try later; what arrived is kept.`,
  );
}

/** The error of a failed write into the browser's storage. */
export function storageError(cause: unknown): DownloadError {
  if (isQuotaError(cause)) {
    return new DownloadError(
      "quota",
      "The browser lets this site store no more. Free space on the disk or remove other models, " +
        "or run the model without storing it: it is then downloaded again at the next visit.",
    );
  }
  const detail = cause instanceof Error ? cause.message : String(cause);
  return new DownloadError(
    "storage",
    `The browser cannot store the model (${detail}); in a private window that is usual. It can ` +
      "still run without being stored.",
  );
}

export function isQuotaError(cause: unknown): boolean {
  return (
    typeof cause === "object" &&
    cause !== null &&
    "name" in cause &&
    (cause.name === "QuotaExceededError" || cause.name === "NS_ERROR_DOM_QUOTA_REACHED")
  );
}

function fileName(url: string): string {
  return decodeURIComponent(new URL(url).pathname.split("/").at(-1) ?? url);
}
