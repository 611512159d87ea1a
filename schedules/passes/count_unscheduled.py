"""Count the operators that no kernel of ours computes."""

from typing import Any

import tvm
from tvm import relax, tirx


def count_unscheduled(module: tvm.IRModule) -> int:
    """Calls, in the Relax functions that take a model's weights, of PrimFuncs that nobody
    scheduled: TVM's plain loops."""
    count = 0

    def visit(node: Any) -> None:
        nonlocal count
        if isinstance(node, relax.Call) and node.args and isinstance(node.args[0], relax.GlobalVar):
            func = module.functions.get(node.args[0])
            if isinstance(func, tirx.PrimFunc):
                count += "tirx.is_scheduled" not in (func.attrs or {})

    for func in module.functions.values():
        if isinstance(func, relax.Function) and "num_input" in (func.attrs or {}):
            relax.analysis.post_order_visit(func, visit)
    return count
