"""From kernels to device and host code, for `tvm.compile`."""

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx.compilation_pipeline import register_tir_pipeline


def _lower_gpu_kernels() -> tuple[Any, Any, Any]:
    """What TVM's own pipeline does, without the passes that guess: kernels say themselves where
    threads meet and what is shared. Functions for the host go through as well."""
    passes = tvm.transform.Sequential(
        [
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.VectorizeLoop(),
            tirx.transform.UnrollLoop(),
            tirx.transform.StmtSimplify(),
            tirx.transform.RemoveNoOp(),
            s_tir.transform.RewriteUnsafeSelect(),
            tirx.transform.AnnotateEntryFunc(),
            tirx.transform.SplitHostDevice(),
            tirx.transform.MakePackedAPI(),
            tirx.transform.BF16StorageLegalize(),
        ]
    )
    return passes, finalize_host_passes, finalize_device_passes


GPU_TIR_PIPELINE = "everycast_gpu"
"""Name of `_lower_gpu_kernels` for `tvm.compile`."""
register_tir_pipeline(GPU_TIR_PIPELINE, _lower_gpu_kernels)
