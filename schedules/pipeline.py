"""From a lowered Relax module to one that the VM code generator takes, in numbered phases."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from .passes.exact_constants import keep_constants_exact

SUBROUTINE = "everycast.subroutine"
"""Attribute of PrimFuncs that other PrimFuncs call, with pointers, and nobody else."""


@tvm.transform.module_pass(opt_level=0)
def keep_subroutines_private(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Without a symbol, a PrimFunc keeps its plain arguments when TVM makes packed functions."""
    updated = tvm.IRModule({}, attrs=module.attrs)
    for variable, func in module.functions.items():
        is_subroutine = SUBROUTINE in (func.attrs or {})
        updated[variable] = func.without_attr("global_symbol") if is_subroutine else func
    return updated


PHASES: tuple[tuple[str, tuple[tvm.transform.Pass, ...]], ...] = (
    ("1-legalize", (
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
    )),
    ("2-fuse", (
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    )),
    ("3-call-kernels", (
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    )),
    ("4-plan-memory", (
        relax.transform.StaticPlanBlockMemory(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
    )),
    ("5-shapes", (
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
        keep_subroutines_private,
    )),
)  # fmt: skip


def with_upper_bounds(module: tvm.IRModule, bounds: Mapping[str, int]) -> tvm.IRModule:
    """Give every Relax function the largest value of each symbolic size, so that one memory plan
    holds for all batches."""
    updated = tvm.IRModule(dict(module.functions.items()), attrs=module.attrs)
    for variable, func in module.functions.items():
        if isinstance(func, relax.Function):
            updated[variable] = func.with_attr("tir_var_upper_bound", dict(bounds))
    return updated


def run_pipeline(
    module: tvm.IRModule, target: tvm.target.Target, *, dump_ir: Path | None = None
) -> tvm.IRModule:
    """Run every phase; with `dump_ir`, write the module after each to `<phase>.py` there."""
    with target:
        for name, passes in PHASES:
            module = tvm.transform.Sequential(list(passes))(module)
            if dump_ir is not None:
                dump_ir.mkdir(parents=True, exist_ok=True)
                (dump_ir / f"{name}.py").write_text(module.script(), encoding="utf-8")
    return module


def _lower_kernels(*, compact: bool) -> tuple[Any, Any, Any]:
    """From emitted kernels to device and host code: what TVM's own pipeline does, without the
    passes that guess (kernels say themselves where threads meet and what is shared) and what LLVM
    does better (common subexpressions, a third of the compile time). Local buffers are never
    merged: they would become too large for a CPU's stack, and an allocation for every block of rows
    costs a quarter of the decoding time.

    compact: shrink buffers to what is used of them; nearly all of the time on kernels for GPUs,
    which have none to shrink.
    """
    compaction = [s_tir.transform.CompactBufferAllocation()] if compact else []
    passes = tvm.transform.Sequential(
        [
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            *compaction,
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
    return passes, finalize_host_passes, _finalize_device


def _finalize_device() -> tvm.transform.Pass:
    return tvm.transform.Sequential([finalize_device_passes(), keep_constants_exact])


CPU_TIR_PIPELINE, GPU_TIR_PIPELINE = "everycast_cpu", "everycast_gpu"
"""Names of `_lower_kernels` for `tvm.compile`."""
register_tir_pipeline(CPU_TIR_PIPELINE, functools.partial(_lower_kernels, compact=True))
register_tir_pipeline(GPU_TIR_PIPELINE, functools.partial(_lower_kernels, compact=False))
