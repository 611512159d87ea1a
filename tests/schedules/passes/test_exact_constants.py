import re

import numpy as np
import pytest
import tvm
from everycast.schedules.pipeline import GPU_TIR_PIPELINE
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

VALUES = np.array(
    [0.5, -0.7, 1 / 3, 0.15915494309189535, 1.4426950408889634, 16777217.0, 3.4028235e38, 1e-40,
     -2.5e-8 / 3, np.inf], "float32",
)  # fmt: skip
BITS = re.compile(r"\((?:uint|unsigned int)\)\(?(\d+)")
DECIMAL = re.compile(r"(-?[\d.]+e[+-]\d+)f")


def stores_values() -> tirx.PrimFunc:
    """Launches a kernel that stores `VALUES`, each by itself."""
    with IRBuilder() as ib:
        with B.prim_func(s_tir=True):
            B.func_name("k")
            B.func_attr({"tirx.noalias": True, "global_symbol": "k"})
            y = B.match_buffer(B.arg("y", B.handle()), [len(VALUES)], "float32")
            with B.sblock("root"):
                B.reads()
                B.writes()
                with B.launch_thread("threadIdx.x", 1):
                    for i, value in enumerate(VALUES):
                        B.buffer_store(y, tirx.FloatImm("float32", float(value)), [i])
        return ib.get()


def constants(source: str) -> list[np.float32]:
    """The constants of a kernel, in order, as a compiler reads them."""
    found = []
    for line in source.splitlines():
        if (bits := BITS.search(line)) is not None:
            found.append(np.uint32(int(bits[1])).view("float32"))
        elif (decimal := DECIMAL.search(line)) is not None:
            found.append(np.float32(decimal[1]))
        elif "INFINITY" in line:
            found.append(np.float32(np.inf))
    return found


@pytest.mark.parametrize("kind", ["opencl", "metal"])
def test_sources_hold_the_very_constants(kind: str) -> None:
    target = tvm.target.Target({"kind": kind, "host": {"kind": "llvm"}})
    executable = tvm.compile(stores_values(), target=target, tir_pipeline=GPU_TIR_PIPELINE)
    source = executable.mod.imports[0].inspect_source()
    np.testing.assert_array_equal(constants(source), VALUES)
    assert source.count("5.000000e-01f") == 1  # what seven digits name stays readable
