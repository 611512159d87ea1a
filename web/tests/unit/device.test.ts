import { describe, expect, it } from "vitest";
import { type DeviceReport, fitModel, inspectDevice } from "../../src/device";
import type { LibraryRecord, ModelRecord } from "../../src/models";

const LIMITS = {
  maxBufferSize: 2 ** 30,
  maxStorageBufferBindingSize: 2 ** 30,
  maxComputeWorkgroupStorageSize: 2 ** 15,
  maxStorageBuffersPerShaderStage: 10,
};

function library(path: string, rest: Partial<LibraryRecord> = {}): LibraryRecord {
  return {
    path,
    num_bytes: 1,
    sha256: "",
    features: [],
    max_binding_bytes: null,
    min_subgroup_size: null,
    is_for_cpu_adapters: false,
    ...rest,
  };
}

const F32 = library("f32");
const F16 = library("f16", { features: ["shader-f16"] });
const SUBGROUPS = library("subgroups", {
  features: ["shader-f16", "subgroups"],
  min_subgroup_size: 32,
});
const CPU = library("cpu", { is_for_cpu_adapters: true });

function model(libraries: readonly LibraryRecord[], largest_tensor_bytes = 2 ** 20): ModelRecord {
  return {
    id: "m",
    name: "m",
    base: "models/m/v1/resolve/main/",
    quantization: "q4f32_1",
    bits_per_weight: 4.5,
    num_parameters: 1,
    licence: null,
    context_window_size: 2048,
    largest_tensor_bytes,
    sampling: {},
    files: [],
    libraries,
  };
}

function device(rest: Partial<Extract<DeviceReport, { status: "available" }>> = {}): DeviceReport {
  return {
    status: "available",
    description: "test",
    is_cpu_adapter: false,
    features: new Set(["shader-f16"]),
    subgroup_size: 0,
    limits: LIMITS,
    ...rest,
  };
}

function adapter(info: Partial<GPUAdapterInfo>): GPU {
  const found = { limits: LIMITS, features: new Set(), info };
  return { requestAdapter: () => Promise.resolve(found) } as unknown as GPU;
}

describe("the device check", () => {
  it.each([
    [{ gpu: undefined, isSecureContext: true }, /has no WebGPU/],
    [{ gpu: undefined, isSecureContext: false }, /not opened securely/],
    [
      {
        gpu: { requestAdapter: () => Promise.resolve(null) } as unknown as GPU,
        isSecureContext: true,
      },
      /offers no GPU/,
    ],
    [
      {
        gpu: { requestAdapter: () => Promise.reject(new Error("blocked")) } as unknown as GPU,
        isSecureContext: true,
      },
      /blocked/,
    ],
  ])("says why there is none", async (environment, reason) => {
    const report = await inspectDevice(environment);
    expect(report.status).toBe("unavailable");
    expect(report.status === "unavailable" && report.reason).toMatch(reason);
    expect(fitModel(model([F32]), report).fits).toBe(false);
  });

  it("knows adapters that compute on the CPU", async () => {
    for (const info of [
      { architecture: "swiftshader" },
      { isFallbackAdapter: true },
      { description: "llvmpipe (LLVM 15)" },
    ]) {
      const report = await inspectDevice({ gpu: adapter(info), isSecureContext: true });
      expect(report.status === "available" && report.is_cpu_adapter).toBe(true);
    }
    const real = await inspectDevice({
      gpu: adapter({ vendor: "apple", architecture: "metal-3" }),
      isSecureContext: true,
    });
    expect(real).toMatchObject({
      status: "available",
      is_cpu_adapter: false,
      description: "apple metal-3",
    });
  });
});

describe("the choice of a library", () => {
  const choice = (libraries: LibraryRecord[], report: DeviceReport): string => {
    const fit = fitModel(model(libraries), report);
    return fit.fits ? fit.library.path : fit.reason;
  };

  it("takes f16 where the device has it, f32 elsewhere", () => {
    expect(choice([F32, F16, CPU], device())).toBe("f16");
    expect(choice([F32, F16, CPU], device({ features: new Set() }))).toBe("f32");
  });

  it("takes subgroups only where they are wide enough", () => {
    const all = [F32, F16, SUBGROUPS, CPU];
    const features = new Set(["shader-f16", "subgroups"]);
    expect(choice(all, device({ features, subgroup_size: 32 }))).toBe("subgroups");
    for (const subgroup_size of [0, 4, 16]) {
      expect(choice(all, device({ features, subgroup_size }))).toBe("f16");
    }
    expect(choice(all, device({ features: new Set(["subgroups"]), subgroup_size: 32 }))).toBe(
      "f32",
    );
  });

  it("takes the kernels for CPU adapters there, if there are any", () => {
    const slow = device({ is_cpu_adapter: true, features: new Set() });
    expect(choice([F32, F16, CPU], slow)).toBe("cpu");
    expect(choice([F32, F16], slow)).toBe("f32");
  });

  it("names the feature that is missing", () => {
    expect(choice([F16], device({ features: new Set() }))).toContain("shader-f16");
    expect(choice([], device())).toContain("without a WebGPU library");
  });

  it("names the limit that is too small", () => {
    const small = device({ limits: { ...LIMITS, maxStorageBuffersPerShaderStage: 8 } });
    expect(choice([F32], small)).toContain("maxStorageBuffersPerShaderStage is 8");
  });

  it("compares a large tensor with the buffers that the runtime will be given", () => {
    const large = model([F32], 200 * 2 ** 20);
    // 512 MB are not asked for: the runtime asks for 1 GB or 128 MB.
    const middling = device({ limits: { ...LIMITS, maxStorageBufferBindingSize: 2 ** 29 } });
    expect(fitModel(large, middling).fits).toBe(false);
    expect(fitModel(large, device()).fits).toBe(true);
    expect(fitModel(model([F32], 2 ** 31), device()).fits).toBe(false);
    // Kernels may be given parts of a buffer.
    const in_parts = model([library("parts", { max_binding_bytes: 2 ** 26 })], 200 * 2 ** 20);
    expect(fitModel(in_parts, middling).fits).toBe(true);
  });
});
