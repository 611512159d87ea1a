"""The rounding `mlc` against MLC-LLM's formula compiled by TVM, dtype for dtype."""

from typing import Any

import numpy as np
import pytest
from everycast.quant_schemes import find_scheme, quantize
from everycast.quant_schemes.bits import unpack_values

N, K = 64, 200


def compiled_quantize(dtype: str, bits: int, group_size: int) -> Any:
    """weight [N, K] → scale [N, groups], q [N, K] uint32."""
    import tvm
    from tvm import relax, te
    from tvm import tirx as tir

    num_groups = -(-K // group_size)

    def rule(weight: Any) -> list[Any]:
        max_int = tir.const(2 ** (bits - 1) - 1, dtype)
        r = te.reduce_axis((0, group_size), name="r")

        def size(i: Any, j: Any) -> Any:
            column = j * group_size + r
            size = tir.if_then_else(column < K, te.abs(weight[i, column]), te.min_value(dtype))
            return te.max(size, axis=r)

        largest = te.compute((N, num_groups), size, name="largest")
        scale = te.compute((N, num_groups), lambda i, j: largest[i, j] / max_int, name="scale")

        def level(i: Any, j: Any) -> Any:
            level = tir.round(weight[i, j] / scale[i, j // group_size] + max_int)
            level = tir.min(tir.max(level, tir.const(0, dtype)), max_int * tir.const(2, dtype))
            return level.astype("uint32")

        return [scale, te.compute((N, K), level, name="level")]

    builder = relax.BlockBuilder()
    weight = relax.Var("weight", relax.TensorType((N, K), dtype))
    with builder.function("main", [weight]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit_te(rule, weight))
        builder.emit_func_output(result)
    library = relax.build(builder.finalize(), target=tvm.target.Target({"kind": "llvm"}))
    main = relax.VirtualMachine(library, tvm.cpu())["main"]
    return lambda array: [tensor.numpy() for tensor in main(tvm.runtime.tensor(array))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q3f16_1", "q4f16_1", "q4f32_1", "q8f16_1"])
def test_equal_to_the_compiled_formula(name: str) -> None:
    fmt = find_scheme(name).linear
    assert fmt.bits is not None
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(fmt.dtype)
    scale, q = compiled_quantize(fmt.dtype, fmt.bits, fmt.group_size)(weight)
    parts = quantize(weight, fmt, "mlc", name="w")
    np.testing.assert_array_equal(parts["q_scale"], scale)
    np.testing.assert_array_equal(unpack_values(parts, fmt, N, K), q)
