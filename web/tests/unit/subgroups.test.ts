import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { findSubgroupSize } from "../../src/subgroups";

/** An adapter whose subgroups have `size` threads, numbered as `place` says. */
function adapter(size: number | undefined, place = (index: number): number => index): GPUAdapter {
  const run = (code: string): Uint32Array => {
    const [, width, height] = /workgroup_size\((\d+), (\d+)\)/.exec(code)!.map(Number);
    const steps = [...code.matchAll(/ShuffleDown\(v, (\d+)u\)/g)].map((match) => Number(match[1]));
    const threads = Array.from({ length: width! * height! }, (_, index) => index);
    const by_place = new Map(threads.map((index) => [place(index), index]));
    let values = threads.map((index) => index * index);
    for (const by of steps) {
      values = threads.map((index) => {
        const there = place(index) + by;
        const is_inside = Math.floor(there / size!) === Math.floor(place(index) / size!);
        return values[index]! + (is_inside ? values[by_place.get(there)!]! : 0);
      });
    }
    const lanes = 2 * (steps[0] ?? 0);
    return Uint32Array.from(values.filter((_, index) => index % lanes === 0));
  };
  let code = "";
  const device = {
    createShaderModule: (description: { code: string }) => {
      code = description.code;
    },
    createComputePipelineAsync: () => Promise.resolve({ getBindGroupLayout: () => null }),
    createBuffer: () => ({
      mapAsync: () => Promise.resolve(),
      getMappedRange: () => run(code).buffer,
    }),
    createBindGroup: () => null,
    createCommandEncoder: () => ({
      beginComputePass: () => ({
        setPipeline: () => {},
        setBindGroup: () => {},
        dispatchWorkgroups: () => {},
        end: () => {},
      }),
      copyBufferToBuffer: () => {},
      finish: () => null,
    }),
    queue: { submit: () => {} },
    destroy: () => {},
  };
  return {
    features: new Set(["subgroups"]),
    info: { subgroupMinSize: size },
    requestDevice: () => Promise.resolve(device),
  } as unknown as GPUAdapter;
}

describe("subgroups", () => {
  beforeEach(() => {
    vi.stubGlobal("GPUBufferUsage", {});
    vi.stubGlobal("GPUMapMode", {});
  });
  afterEach(() => vi.unstubAllGlobals());

  it("have as many neighbours as the adapter says, 32 at most", async () => {
    for (const size of [4, 8, 16, 32]) expect(await findSubgroupSize(adapter(size))).toBe(size);
    expect(await findSubgroupSize(adapter(64))).toBe(32);
    expect(await findSubgroupSize(adapter(128))).toBe(32);
  });

  it("count as none where neighbours do not share one", async () => {
    // Two by two threads of neighbouring rows of eight, as quads of pixels are.
    const quads = (index: number): number =>
      (index & ~0b1111) | ((index & 0b110) << 1) | ((index >> 2) & 0b10) | (index & 1);
    expect(await findSubgroupSize(adapter(32, quads))).toBe(0);
    expect(await findSubgroupSize(adapter(32, (index) => index ^ 1))).toBe(0);
  });

  it("count as none where the browser does not tell, or refuses", async () => {
    expect(await findSubgroupSize(adapter(undefined))).toBe(0);
    const without = { ...adapter(32), features: new Set() } as unknown as GPUAdapter;
    expect(await findSubgroupSize(without)).toBe(0);
    const requestDevice = (): Promise<never> => Promise.reject(new Error("refused"));
    const refused = { ...adapter(32), requestDevice } as unknown as GPUAdapter;
    expect(await findSubgroupSize(refused)).toBe(0);
  });
});
