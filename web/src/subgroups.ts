/** Which threads of a block share a subgroup, found out on the device.
 *
 * Kernels hand values to neighbours: threads whose numbers follow each other. WGSL promises subgroups
 * of some size, but not that neighbours share one; on GPUs they do, and this says whether it is so. */

/** Blocks in the shapes of the kernels: threads side by side, and how many such rows. */
const BLOCKS = [
  [8, 16],
  [16, 8],
  [32, 4],
  [256, 1],
] as const;

/** Each thread adds up the numbers of its neighbours, as `sum_subgroup` of the kernels does; the
 * first of every `lanes` stores. */
function sumKernel(width: number, height: number, lanes: number): string {
  const steps = [];
  for (let by = lanes / 2; by >= 1; by /= 2) steps.push(`v += subgroupShuffleDown(v, ${by}u);`);
  return `enable subgroups;
@group(0) @binding(0) var<storage, read_write> sums : array<u32>;
@compute @workgroup_size(${width}, ${height})
fn main(@builtin(local_invocation_index) index : u32) {
  var v = index * index;
  ${steps.join("\n  ")}
  if (index % ${lanes}u == 0u) { sums[index / ${lanes}u] = v; }
}`;
}

function expectedSums(num_threads: number, lanes: number): number[] {
  const sums = Array.from({ length: num_threads / lanes }, () => 0);
  for (let i = 0; i < num_threads; i++) sums[Math.floor(i / lanes)]! += i * i;
  return sums;
}

/** How many neighbours can hand each other values, at most 32; 0 if none are sure to. Uses up the
 * adapter: it gives one device. */
export async function findSubgroupSize(adapter: GPUAdapter): Promise<number> {
  const size = adapter.info?.subgroupMinSize ?? 0;
  if (!adapter.features.has("subgroups") || size < 2) return 0;
  let device: GPUDevice | undefined;
  try {
    device = await adapter.requestDevice({ requiredFeatures: ["subgroups"] });
    const lanes = Math.min(32, size);
    for (const [width, height] of BLOCKS) {
      const sums = await sumOnDevice(device, width, height, Math.min(lanes, width));
      const expected = expectedSums(width * height, Math.min(lanes, width));
      if (expected.some((sum, i) => sums[i] !== sum)) return 0;
    }
    return lanes;
  } catch {
    return 0; // the other libraries do without
  } finally {
    device?.destroy();
  }
}

async function sumOnDevice(
  device: GPUDevice,
  width: number,
  height: number,
  lanes: number,
): Promise<Uint32Array> {
  const size = ((width * height) / lanes) * Uint32Array.BYTES_PER_ELEMENT;
  const module = device.createShaderModule({ code: sumKernel(width, height, lanes) });
  const pipeline = await device.createComputePipelineAsync({ layout: "auto", compute: { module } });
  const sums = device.createBuffer({
    size,
    usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC,
  });
  const read = device.createBuffer({
    size,
    usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
  });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline);
  const entries = [{ binding: 0, resource: { buffer: sums } }];
  pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
  pass.dispatchWorkgroups(1);
  pass.end();
  encoder.copyBufferToBuffer(sums, 0, read, 0, size);
  device.queue.submit([encoder.finish()]);
  await read.mapAsync(GPUMapMode.READ);
  return new Uint32Array(read.getMappedRange().slice(0));
}
