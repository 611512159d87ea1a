"""What a library for browsers has beside the model: from logits to a token, on the device."""

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from ...schedules.gpu.limits import GpuLimits
from ...schedules.webgpu.logit_updates import apply_bitmask, apply_logit_bias, apply_penalty
from ...schedules.webgpu.softmax import PARTS, softmax_with_temperature
from ...schedules.webgpu.top_p import sample_with_top_p, token_ids


def logit_functions(vocab_size: int, limits: GpuLimits) -> dict[str, tirx.PrimFunc]:
    """Functions that change logits in place, by their names in the library."""
    functions = [
        make(vocab_size, limits) for make in (apply_logit_bias, apply_penalty, apply_bitmask)
    ]
    return {str(func.attrs["global_symbol"]): func for func in functions}


def with_sampling(module: tvm.IRModule, vocab_size: int, limits: GpuLimits) -> tvm.IRModule:
    """The module with

    - `softmax_with_temperature` (logits [b, 1, V], temperature [b]) → probabilities [b, 1, V];
    - `argsort_probs` (probs [b, V]) → (probs, ids [b, V]): in the order of the vocabulary, as
      sampling needs no other;
    - `sample_with_top_p` (probs, ids, uniform [n], rows [n], top_p [b]) → [n] int32.
    """
    builder = relax.BlockBuilder(module)
    batch, samples = tirx.Var("batch_size", "int64"), tirx.Var("num_samples", "int64")
    row, ids = [batch, vocab_size], relax.TensorType([batch, vocab_size], "int32")

    logits = _argument("logits", [batch, 1, vocab_size])
    temperature = _argument("temperature", [batch])
    with builder.function("softmax_with_temperature", [logits, temperature]):
        parts = relax.TensorType([batch, PARTS, 2], "float32")
        func = softmax_with_temperature(vocab_size, limits)
        both = _call(builder, func, [logits, temperature], [logits.ty, parts])
        builder.emit_func_output(builder.emit(relax.TupleGetItem(both, 0)))

    probs = _argument("probs", row)
    with builder.function("argsort_probs", [probs]):
        found = _call(builder, token_ids(vocab_size, limits), [probs], ids)
        builder.emit_func_output(relax.Tuple([probs, found]))

    arguments = [
        _argument("sorted_probs", row),
        relax.Var("sorted_ids", ids),
        _argument("uniform", [samples]),
        relax.Var("rows", relax.TensorType([samples], "int32")),
        _argument("top_p", [batch]),
    ]
    with builder.function("sample_with_top_p", arguments):
        func = sample_with_top_p(vocab_size, limits)
        tokens = relax.TensorType([samples], "int32")
        builder.emit_func_output(_call(builder, func, arguments, tokens))
    return builder.get()


def _argument(name: str, shape: Sequence[Any]) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), "float32"))


def _call(
    builder: relax.BlockBuilder, func: tirx.PrimFunc, args: Sequence[relax.Expr], out: Any
) -> relax.Var:
    name = str(func.attrs["global_symbol"])
    variable = builder.add_func(func.without_attr("global_symbol"), name)
    with builder.dataflow():
        result = builder.emit_output(relax.call_tir(variable, relax.Tuple(list(args)), out))
    return result
