"""From a lowered Relax module to one that the VM code generator takes, in numbered phases."""

from collections.abc import Mapping
from pathlib import Path

import tvm
from tvm import relax

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
