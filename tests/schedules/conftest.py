"""A small quantized model, and how to compile and run what the passes make of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import pack_values
from everycast.quant_schemes.layers import apply_formats, named_weights
from everycast.relax_models import operators as ops
from everycast.relax_models.layers import Embedding, Linear, RMSNorm
from everycast.schedules.cpu.isa import isa_of
from everycast.schedules.cpu.lowering import cpu_handlers
from everycast.schedules.pipeline import CPU_TIR_PIPELINE, run_pipeline
from tvm import relax
from tvm.relax.frontend import nn
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

VOCAB, HIDDEN, INNER = 24, 32, 48
FORMATS = {
    "embed.weight": TensorFormat("float16", 8, 32, None),
    "gate.weight": TensorFormat("float16", 4, 32, 7),
    "up.weight": TensorFormat("float16", 4, 32, 7),
    "down.weight": TensorFormat("float32"),
}


class TinyModel(nn.Module):
    """A gated MLP between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        self.embed = Embedding(VOCAB, HIDDEN)
        self.norm = RMSNorm(HIDDEN, 1e-5)
        self.gate = Linear(HIDDEN, INNER)
        self.up = Linear(HIDDEN, INNER)
        self.down = Linear(INNER, HIDDEN, bias=True)

    def forward(self, ids: nn.Tensor) -> nn.Tensor:
        x = ops.embedding(ids, self.embed)
        inner = ops.gated_mlp(ops.rms_norm(x, self.norm), self.gate, self.up, "silu")
        return ops.linear_add(inner, self.down, x, role="mlp")

    def logits(self, hidden: nn.Tensor) -> nn.Tensor:
        (result,) = ops.linears(ops.rms_norm(hidden, self.norm), self.embed, role="head")
        return result


def export():
    """(module, parameter names, tensors by name)."""
    model = TinyModel()
    apply_formats(model, FORMATS)
    mode = {"param_mode": "plain", "effect_mode": "none"}
    spec = {
        "forward": {"ids": nn.spec.Tensor(["num_tokens"], "int32"), "$": mode},
        "logits": {"hidden": nn.spec.Tensor(["num_tokens", HIDDEN], "float32"), "$": mode},
    }
    module, parameters = model.export_tvm(spec=nn.spec.ModuleSpec.from_raw(spec, model))[:2]
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal([int(s) for s in p.shape]).astype(str(p.dtype))
        for name, p in parameters
        if not name.endswith("q_weight")
    }
    for name, layer in named_weights(model).items():
        if layer.format.bits is not None:
            q = rng.integers(0, 1 << layer.format.bits, (layer.n, layer.k), dtype=np.uint8)
            prefix = name.removesuffix("weight")
            tensors[f"{prefix}q_weight"] = pack_values(q, layer.format)["q_weight"]
            tensors[f"{prefix}q_scale"] *= 0.02
    return module, [name for name, _ in parameters], tensors


def compile_for(module, target):
    planned = run_pipeline(module, target)
    executable = tvm.compile(
        planned,
        target,
        relax_pipeline=tvm.transform.Sequential([]),
        tir_pipeline=CPU_TIR_PIPELINE,
    )
    return relax.VirtualMachine(executable, tvm.cpu())


@pytest.fixture
def tiny():
    """The model above for this machine: module, names, tensors by name, target, handlers."""
    module, names, tensors = export()
    target = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})
    return SimpleNamespace(
        module=module,
        names=names,
        tensors={name: tvm.runtime.tensor(array) for name, array in tensors.items()},
        target=target,
        handlers=cpu_handlers(isa_of(target), "float32"),
        compile=lambda module: compile_for(module, target),
    )
