import json

import numpy as np
import pytest
import tvm
from everycast.schedules.passes.lower_operators import ATTRIBUTE, Parameter, lower_operators
from tvm import relax, tirx


def kinds_left(module):
    """Operators that still are the plain PrimFuncs of the model."""
    return sorted(
        json.loads(str(func.attrs[ATTRIBUTE]))["kind"]
        for func in module.functions.values()
        if isinstance(func, tirx.PrimFunc) and ATTRIBUTE in (func.attrs or {})
    )


def weights_of(module, function):
    func = module[function]
    return [p.name for p in func.params[int(func.attrs["num_input"]) :]]


def arguments(lowered, vm, tensors):
    """The parameters of the lowered functions, packed as the engine does it."""
    result = []
    for parameter in lowered.parameters:
        sources = [tensors[name] for name in parameter.sources]
        result.append(vm[parameter.pack](*sources) if parameter.pack else sources[0])
        assert tuple(result[-1].shape) == parameter.shape
        assert str(result[-1].dtype) == parameter.dtype
    return result


def run(vm, parameters, ids):
    hidden = vm["forward"](tvm.runtime.tensor(ids), *parameters)
    return hidden.numpy(), vm["logits"](hidden, *parameters).numpy()


def test_every_operator_is_replaced(tiny):
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    assert lowered.lowered == {
        "embedding": 1, "rms_norm": 2, "gated_mlp": 1, "linear_add": 1, "linears": 1,
    }  # fmt: skip
    assert kinds_left(lowered.module) == []
    assert kinds_left(tiny.module) == [
        "embedding",
        "gated_mlp",
        "linear_add",
        "linears",
        "rms_norm",
    ]


def test_the_parameters_in_order_of_use(tiny):
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    assert [(p.name, p.sources, p.pack is not None) for p in lowered.parameters] == [
        ("embed.packed", ("embed.q_weight", "embed.q_scale", "embed.q_min"), True),
        ("norm.weight", ("norm.weight",), False),
        ("gate.packed", ("gate.q_weight", "gate.q_scale"), True),
        ("up.packed", ("up.q_weight", "up.q_scale"), True),
        ("down.packed", ("down.weight",), True),
        ("down.bias", ("down.bias",), False),
    ]
    assert lowered.parameters[1] == Parameter("norm.weight", (32,), "float32", ("norm.weight",))


def test_every_function_takes_all_parameters(tiny):
    """The engine keeps one list; a weight shared by two functions is packed once."""
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    names = [p.name for p in lowered.parameters]
    assert weights_of(lowered.module, "forward") == weights_of(lowered.module, "logits") == names
    assert names.count("embed.packed") == 1
    packers = {p.pack for p in lowered.parameters if p.pack}
    functions = [
        variable.name_hint
        for variable, func in lowered.module.functions.items()
        if isinstance(func, relax.Function)
    ]
    assert sorted(functions) == sorted({"forward", "logits", *packers})


def test_weights_of_equal_format_and_shape_share_a_packer(tiny):
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    packers = {p.name: p.pack for p in lowered.parameters if p.pack}
    assert packers["gate.packed"] == packers["up.packed"]
    assert len(set(packers.values())) == 3


@pytest.mark.parametrize(
    "missing", ["embedding", "rms_norm", "gated_mlp", "linear_add", "linears", "everything"]
)
def test_lowered_or_not_the_result_is_the_same(tiny, missing):
    """An operator without a handler keeps its PrimFunc and takes its weight's portable parts."""
    handlers = {} if missing == "everything" else dict(tiny.handlers)
    handlers.pop(missing, None)
    lowered = lower_operators(tiny.module, tiny.names, handlers)
    if handlers:
        assert kinds_left(lowered.module) == [missing]
        assert missing not in lowered.lowered
    else:
        assert lowered.lowered == {}
        assert {p.name for p in lowered.parameters} == set(tiny.names)
    plain, vm = tiny.compile(tiny.module), tiny.compile(lowered.module)
    for count in (1, 9):
        ids = np.arange(3, 3 + count, dtype="int32")
        expected = run(plain, [tiny.tensors[name] for name in tiny.names], ids)
        result = run(vm, arguments(lowered, vm, tiny.tensors), ids)
        for value, reference in zip(result, expected, strict=True):
            assert np.abs(reference).max() > 0.1
            np.testing.assert_allclose(value, reference, atol=2e-5, rtol=1e-4)


def test_a_weight_may_be_packed_and_plain_at_once(tiny):
    """The tied weight: packed for the embedding, in parts for a head without a handler."""
    handlers = {kind: h for kind, h in tiny.handlers.items() if kind != "linears"}
    lowered = lower_operators(tiny.module, tiny.names, handlers)
    names = [p.name for p in lowered.parameters]
    assert {"embed.packed", "embed.q_weight", "embed.q_scale", "embed.q_min"} <= set(names)
    plain = next(p for p in lowered.parameters if p.name == "embed.q_weight")
    assert (plain.sources, plain.pack) == (("embed.q_weight",), None)


def test_a_handler_may_decline(tiny):
    handlers = {**tiny.handlers, "gated_mlp": lambda lowering, op, args: None}
    lowered = lower_operators(tiny.module, tiny.names, handlers)
    assert kinds_left(lowered.module) == ["gated_mlp"]
    assert "gated_mlp" not in lowered.lowered
    assert "gate.packed" not in [p.name for p in lowered.parameters]


def test_names_must_cover_the_parameters(tiny):
    with pytest.raises(ValueError, match="shorter"):
        lower_operators(tiny.module, tiny.names[:-1], tiny.handlers)
