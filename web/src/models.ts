/** `models.json`: what can be run here, written by `everycast web` and `everycast package web`. */

export interface FileRecord {
  /** Relative to the model's `base`. */
  readonly path: string;
  readonly num_bytes: number;
  /** Lower-case hexadecimal SHA-256 of the whole file. */
  readonly sha256: string;
}

export interface LibraryRecord extends FileRecord {
  /** WebGPU features that the library needs, such as `shader-f16`. */
  readonly features: readonly string[];
  /** The largest part of a buffer that a kernel is given; null if the library does not say. */
  readonly max_binding_bytes: number | null;
  /** Threads that must be able to hand each other values; null if the library relies on none. */
  readonly min_subgroup_size: number | null;
  /** Its kernels suit adapters that compute on the CPU, and are slower on a GPU. */
  readonly is_for_cpu_adapters: boolean;
}

/** What the model's makers advise; absent where they say nothing. */
export interface SamplingAdvice {
  readonly temperature?: number;
  readonly top_p?: number;
}

export interface ModelRecord {
  readonly id: string;
  readonly name: string;
  /** Folder of the files, relative to `models.json`; it changes whenever a file changes. */
  readonly base: string;
  readonly quantization: string;
  readonly bits_per_weight: number;
  readonly num_parameters: number;
  readonly licence: string | null;
  readonly context_window_size: number;
  /** Bytes of the largest tensor, or part of one, that is loaded: a GPU buffer must hold it. */
  readonly largest_tensor_bytes: number;
  readonly sampling: SamplingAdvice;
  /** Everything but the libraries. */
  readonly files: readonly FileRecord[];
  /** One for each kind of device, over the same weights. */
  readonly libraries: readonly LibraryRecord[];
}

export interface ModelIndex {
  readonly models: readonly ModelRecord[];
  /** This host also answers OpenAI's API. */
  readonly has_server: boolean;
}

export const FORMAT_VERSION = 2;

export class ModelIndexError extends Error {
  override readonly name = "ModelIndexError";
}

/** Throws ModelIndexError for what this page cannot read. */
export function parseModelIndex(document: unknown): ModelIndex {
  const index = document as (Partial<ModelIndex> & { format_version?: unknown }) | null;
  if (typeof index !== "object" || index === null || !Array.isArray(index.models)) {
    throw new ModelIndexError("models.json is not a list of models; serve this page again");
  }
  if (index.format_version !== FORMAT_VERSION) {
    throw new ModelIndexError(
      `models.json has format version ${String(index.format_version)}, this page reads ` +
        `${FORMAT_VERSION}; reload the page, or write the folder again`,
    );
  }
  return { models: index.models, has_server: index.has_server === true };
}

/** Fetches the index beside the page; offline, the service worker answers with the last one. */
export async function fetchModels(base: string): Promise<ModelIndex> {
  const url = new URL("models.json", base);
  const response = await fetch(url, { cache: "no-cache" }).catch(() => {
    throw new ModelIndexError("This page's host cannot be reached, so its models are not known.");
  });
  const isJson = response.headers.get("content-type")?.includes("json") ?? false;
  if (!response.ok || !isJson) {
    const status = response.ok ? "an answer that is not JSON" : `HTTP ${response.status}`;
    throw new ModelIndexError(`${url.pathname} gave ${status}: this host lists no models`);
  }
  return parseModelIndex(await response.json());
}
