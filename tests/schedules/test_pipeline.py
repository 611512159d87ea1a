import numpy as np
import tvm
from everycast.schedules.passes.lower_operators import lower_operators
from everycast.schedules.pipeline import PHASES, run_pipeline, with_upper_bounds
from tvm import relax


def test_upper_bounds_go_to_every_relax_function(tiny):
    bounded = with_upper_bounds(tiny.module, {"num_tokens": 64})
    for variable, func in bounded.functions.items():
        before = tiny.module[variable]
        if isinstance(func, relax.Function):
            assert dict(func.attrs["tir_var_upper_bound"]) == {"num_tokens": 64}
            assert "tir_var_upper_bound" not in before.attrs
        else:
            assert func.same_as(before)


def storages(module, function):
    """Sizes of the storages that a planned function allocates; None for one known at run time."""
    sizes = []

    def visit(node):
        if isinstance(node, relax.Call) and node.op == tvm.ir.Op.get("relax.vm.alloc_storage"):
            size = node.args[0]
            known = isinstance(size, relax.ShapeExpr) and hasattr(size.values[0], "value")
            sizes.append(int(size.values[0].value) if known else None)

    relax.analysis.post_order_visit(module[function], visit)
    return sizes


def test_memory_is_planned_for_the_largest_batch(tiny):
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers).module
    for tokens in (16, 64):
        planned = run_pipeline(with_upper_bounds(lowered, {"num_tokens": tokens}), tiny.target)
        # The embedding, its norm, the inner values of the MLP; a result is as large as it must be.
        expected = [4 * tokens * size for size in (32, 32, 48)]
        assert storages(planned, "forward") == [*expected, None]
    unbounded = run_pipeline(lowered, tiny.target)
    assert set(storages(unbounded, "forward")) == {None}


def test_planned_memory_serves_every_batch(tiny):
    """One function, batches of any size up to the bound, one after another."""
    bounded = with_upper_bounds(tiny.module, {"num_tokens": 16})
    vm, plain = tiny.compile(bounded), tiny.compile(tiny.module)
    weights = [tiny.tensors[name] for name in tiny.names]
    for count in (3, 16, 1, 8):
        ids = tvm.runtime.tensor(np.arange(count, dtype="int32"))
        result = vm["forward"](ids, *weights).numpy()
        np.testing.assert_array_equal(result, plain["forward"](ids, *weights).numpy())


def test_dump_ir_writes_every_phase(tiny, tmp_path):
    folder = tmp_path / "new" / "ir"
    run_pipeline(tiny.module, tiny.target, dump_ir=folder)
    names = [f"{name}.py" for name, _ in PHASES]
    assert sorted(path.name for path in folder.iterdir()) == names
    texts = [(folder / name).read_text(encoding="utf-8") for name in names]
    assert "call_tir" in texts[0] and "call_tir" not in texts[-1]
    assert len(set(texts)) == len(texts)


def test_the_input_module_stays_as_it_was(tiny):
    before = tiny.module.script()
    run_pipeline(tiny.module, tiny.target)
    assert tiny.module.script() == before
