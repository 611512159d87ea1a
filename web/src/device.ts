/** Whether this device can run a model, found out before a byte of it is downloaded. */

import { formatBytes } from "./format";
import type { LibraryRecord, ModelRecord } from "./models";
import { findSubgroupSize } from "./subgroups";

/** What the runtime asks of a device, the best first (web-runtime's `detectGPUDevice`): of the
 * first two it is given exactly one of the sizes here, whatever more the device has. */
const ASKED_LIMITS = {
  maxBufferSize: [2 ** 30, 2 ** 28],
  maxStorageBufferBindingSize: [2 ** 30, 2 ** 27],
  maxComputeWorkgroupStorageSize: [2 ** 15],
  maxStorageBuffersPerShaderStage: [10],
} as const satisfies Record<string, readonly number[]>;

type LimitName = keyof typeof ASKED_LIMITS;

export type DeviceReport =
  | { readonly status: "unavailable"; readonly reason: string; readonly advice: string }
  | {
      readonly status: "available";
      readonly description: string;
      /** The adapter computes on the CPU: correct, but slow. */
      readonly is_cpu_adapter: boolean;
      readonly features: ReadonlySet<string>;
      /** How many neighbouring threads can hand each other values; 0 if none can. */
      readonly subgroup_size: number;
      readonly limits: Readonly<Record<LimitName, number>>;
    };

/** The parts of the environment that the check reads; tests give their own. */
export interface DeviceEnvironment {
  readonly gpu: GPU | undefined;
  readonly isSecureContext: boolean;
}

export async function inspectDevice(
  environment: DeviceEnvironment = { gpu: navigator.gpu, isSecureContext },
): Promise<DeviceReport> {
  if (!environment.isSecureContext) {
    return {
      status: "unavailable",
      reason: "This page was not opened securely, so the browser hides WebGPU from it.",
      advice: "Open it by https:// or on localhost.",
    };
  }
  if (environment.gpu === undefined) {
    return {
      status: "unavailable",
      reason: "This browser has no WebGPU.",
      advice:
        "Recent Chrome, Edge, Safari and Firefox have it; on Linux and on phones it may have to be switched on.",
    };
  }
  let adapter: GPUAdapter | null;
  try {
    adapter = await environment.gpu.requestAdapter({ powerPreference: "high-performance" });
  } catch (error) {
    return noAdapter(String(error instanceof Error ? error.message : error));
  }
  if (adapter === null) return noAdapter("");
  const { limits, features, info } = adapter;
  return {
    status: "available",
    description: describeAdapter(info),
    is_cpu_adapter: isCpuAdapter(adapter),
    features: new Set(features),
    subgroup_size: await findSubgroupSize(adapter),
    limits: {
      maxBufferSize: limits.maxBufferSize,
      maxStorageBufferBindingSize: limits.maxStorageBufferBindingSize,
      maxComputeWorkgroupStorageSize: limits.maxComputeWorkgroupStorageSize,
      maxStorageBuffersPerShaderStage: limits.maxStorageBuffersPerShaderStage,
    },
  };
}

function noAdapter(detail: string): DeviceReport {
  return {
    status: "unavailable",
    reason: `WebGPU is there, but the browser offers no GPU${detail ? ` (${detail})` : ""}.`,
    advice: "The driver may be too old or blocked: chrome://gpu, or about:support, says why.",
  };
}

function describeAdapter(info: GPUAdapterInfo | undefined): string {
  const words = [info?.description || [info?.vendor, info?.architecture].filter(Boolean).join(" ")];
  return words[0] || "a GPU the browser does not name";
}

function isCpuAdapter(adapter: GPUAdapter): boolean {
  const { info } = adapter;
  // The flag moved from the adapter to its info, and not every browser has either.
  const legacy = adapter as GPUAdapter & { readonly isFallbackAdapter?: boolean };
  if (info?.isFallbackAdapter || legacy.isFallbackAdapter) return true;
  const words = `${info?.vendor} ${info?.architecture} ${info?.device} ${info?.description}`;
  return /swiftshader|llvmpipe|basic render/i.test(words);
}

export type Fit =
  | { readonly fits: true; readonly library: LibraryRecord }
  | { readonly fits: false; readonly reason: string };

/** The best library of a model for a device, or why none runs there. */
export function fitModel(model: ModelRecord, device: DeviceReport): Fit {
  if (device.status === "unavailable") return { fits: false, reason: device.reason };
  const missing = (library: LibraryRecord): string[] =>
    library.features.filter((feature) => !device.features.has(feature));
  const usable = model.libraries.filter(
    (library) =>
      missing(library).length === 0 && (library.min_subgroup_size ?? 0) <= device.subgroup_size,
  );
  // First by the kind of adapter, then what uses most of the device: subgroups before f16 alone,
  // and that before f32.
  const rank = (library: LibraryRecord): number =>
    (library.is_for_cpu_adapters === device.is_cpu_adapter ? 100 : 0) + library.features.length;
  const [best] = usable.sort((a, b) => rank(b) - rank(a));
  if (best !== undefined) {
    const reason = findSmallLimit(model, best, device.limits);
    return reason === null ? { fits: true, library: best } : { fits: false, reason };
  }
  const features = [...new Set(model.libraries.flatMap(missing))].join(", ");
  return {
    fits: false,
    reason: features
      ? `This device lacks the WebGPU feature ${features}, which every build of this model needs.`
      : "This model was published without a WebGPU library.",
  };
}

/** Which limit is too small for a model; null if none is. */
function findSmallLimit(
  model: ModelRecord,
  library: LibraryRecord,
  limits: Readonly<Record<LimitName, number>>,
): string | null {
  const needed_bytes: Partial<Record<LimitName, number>> = {
    maxBufferSize: model.largest_tensor_bytes,
    maxStorageBufferBindingSize: library.max_binding_bytes ?? model.largest_tensor_bytes,
  };
  for (const [name, asked] of Object.entries(ASKED_LIMITS) as [LimitName, readonly number[]][]) {
    const needed = needed_bytes[name] ?? 0;
    const least = asked.filter((size) => size >= needed).at(-1);
    if (least === undefined) {
      return `The model needs a buffer of ${formatBytes(needed)}, more than browsers give.`;
    }
    if (limits[name] < least) {
      return `This device's ${name} is ${limits[name]}; the model needs ${least}.`;
    }
  }
  return null;
}

export interface StorageReport {
  /** Bytes that the browser would still let this site store; null if it does not say. */
  readonly num_free_bytes: number | null;
}

export async function inspectStorage(): Promise<StorageReport> {
  try {
    const { quota, usage } = await navigator.storage.estimate();
    if (quota === undefined || usage === undefined) return { num_free_bytes: null };
    return { num_free_bytes: Math.max(0, quota - usage) };
  } catch {
    return { num_free_bytes: null };
  }
}
