"""Kernel times in a browser: ours beside TVM's default GPU schedules (dlight), on one adapter.

    python -m everycast.benchmarks.web_kernels [MODEL] [--rounds 3] [--prompt-tokens 64]
        [--built] [-o FILE]

Both libraries hold the same model over the same weights and run in stock WebLLM, in headless
Chromium. In the one called dlight, weights are dequantized and multiplied as MLC-LLM does it,
and every kernel of a linear layer, of the embedding and of the norms is scheduled by
`dlight.ApplyDefaultSchedule`; attention and sampling are ours in both. Times are the device's own
(`timestamp-query`), the libraries taking turns; printed are medians, as Markdown. `-o` writes
the rounds as JSON, after those that are in the file already: with `--built`, which takes the
libraries of an earlier run, rounds can be measured a few at a time.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import tvm
from tvm import relax, te, tirx, topi
from tvm.s_tir import dlight
from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

from ..artifact.cache import cache_dir
from ..artifact.tensor_format import TensorFormat
from ..relax_models.weight_expr import element
from ..schedules.gpu.limits import GpuLimits
from ..schedules.gpu.lowering import gpu_handlers
from ..schedules.passes.lower_operators import LoweredModel, Lowering, lower_operators
from ..schedules.pipeline import GPU_TIR_PIPELINE
from ..targets.build import BuildRequest, compile_model
from ..targets.webgpu import target as webgpu
from .browser import Browser, Page
from .machine import cpu_name

LIBRARY = "lib/webgpu-cpu-adapter.wasm"
VARIANTS = ("dlight", "everycast")
OURS_IN_BOTH = ("rotary_table", "rotate_and_append", "attention", "take_rows")
PHASES = ("prefill", "decode")
SCHEME = "q4f32_1"
"""MLC-LLM's for devices without float16, which kernels of dlight cannot do without otherwise."""
_OF_DLIGHT = "everycast.dlight"
"""Attribute of PrimFuncs that dlight scheduled."""
_MARKS = {_OF_DLIGHT: True, "op_pattern": 8}
"""8: is not fused with others any more."""
_PIPELINE = "everycast_web_dlight"


@functools.cache
def _linear(
    fmt: TensorFormat, n: int, k: int, *, bias: bool, residual: bool, one_row: bool
) -> tirx.PrimFunc:
    """x [m, K], parts, (bias), (residual) → [m, N], as MLC-LLM writes it, scheduled by dlight."""
    m, columns, depth = _rows(one_row), _int64(n), _int64(k)
    x = te.placeholder((m, depth), "float32", "x")
    parts = [
        te.placeholder([_int64(size) for size in shape], dtype, name)
        for name, (shape, dtype) in fmt.parts(n, k).items()
    ]
    weight = te.compute((columns, depth), lambda j, i: element(fmt, parts, j, i), "dequantize")
    axis = te.reduce_axis((_int64(0), depth), "axis")
    y = te.compute((m, columns), lambda i, j: te.sum(x[i, axis] * weight[j, axis], axis), "matmul")
    arguments = [x, *parts]
    if bias:
        added = te.placeholder((columns,), "float32", "bias")
        arguments.append(added)
        y = topi.add(y, added)
    if residual:
        other = te.placeholder((m, columns), "float32", "residual")
        arguments.append(other)
        y = topi.add(y, other)
    func = te.create_prim_func([*arguments, y])
    return _scheduled(func).with_attr("global_symbol", f"dlight_linear_{n}_{k}")


@functools.cache
def _gate(n: int, activation: str, *, one_row: bool) -> tirx.PrimFunc:
    if activation != "silu":
        raise SystemExit(f"activation {activation} is not written for dlight here: use silu models")
    shape = (_rows(one_row), _int64(n))
    gate, up = (te.placeholder(shape, "float32", name) for name in ("gate", "up"))
    y = te.compute(shape, lambda i, j: gate[i, j] * te.sigmoid(gate[i, j]) * up[i, j], "gated")
    func = te.create_prim_func([gate, up, y])
    return _scheduled(func).with_attr("global_symbol", f"dlight_gate_{n}")


def _rows(one_row: bool) -> tirx.Expr:
    return _int64(1) if one_row else te.var("m", "int64")


def _int64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _default_schedules() -> tvm.transform.Pass:
    rules = dlight.gpu
    return dlight.ApplyDefaultSchedule(
        rules.Matmul(), rules.GEMV(), rules.Reduction(), rules.GeneralReduction(), rules.Fallback()
    )


def _scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    scheduled = _default_schedules()(tvm.IRModule({"main": func}))["main"]
    return scheduled.with_attrs(_MARKS)


def _schedule_the_rest(module: tvm.IRModule) -> tvm.IRModule:
    """Schedule what has no schedule yet."""
    plain = [
        variable
        for variable, func in module.functions.items()
        if isinstance(func, tirx.PrimFunc) and not func.attrs.get("tirx.is_scheduled")
    ]
    scheduled = _default_schedules()(module)
    for variable in plain:
        scheduled[variable] = scheduled[variable].with_attrs(_MARKS)
    return scheduled


def _tir_pipeline(**options: Any) -> tuple[Any, Any, Any]:
    """TVM's passes for the kernels of dlight, which they synchronize, and ours for the others."""
    default = get_tir_pipeline("s_tir", **options)[0]
    lean, finalize_host, finalize_device = get_tir_pipeline(GPU_TIR_PIPELINE, **options)

    def lower(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        merged = tvm.IRModule({}, attrs=module.attrs)
        for passes, is_dlight in ((default, True), (lean, False)):
            part = tvm.IRModule({}, attrs=module.attrs)
            for variable, func in module.functions.items():
                if bool(func.attrs.get(_OF_DLIGHT)) == is_dlight:
                    part[variable] = func
            for variable, func in passes(part).functions.items():
                merged[variable] = func
        return merged

    both = tvm.transform.module_pass(lower, opt_level=0, name="lower")
    return both, finalize_host, finalize_device


class _DlightLowering:
    """Handlers of the operators with weights, for `lower_operators`."""

    def linears(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        outputs, rest = [], list(args[1:])
        for weight, bias in zip(op["weights"], op["biases"], strict=True):
            outputs.append(lowering.emit(self._call(lowering, weight, bias, args[0], rest)))
        return outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)

    def linear_add(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        rest = list(args[1:-1])
        return self._call(lowering, op["weight"], op["bias"], args[0], rest, args[-1])

    def gated_mlp(
        self, lowering: Lowering, op: Mapping[str, Any], args: Sequence[relax.Expr]
    ) -> relax.Expr:
        rest = list(args[1:])
        both = [
            lowering.emit(self._call(lowering, weight, bias, args[0], rest))
            for weight, bias in zip(op["weights"], op["biases"], strict=True)
        ]
        m, n = args[0].ty.shape[0], op["weights"][0]["n"]
        func = _gate(n, op["activation"], one_row=isinstance(m, tirx.IntImm))
        return lowering.call(func, both, [((m, n), "float32")])

    def _call(
        self,
        lowering: Lowering,
        weight: Mapping[str, Any],
        bias: bool,
        x: relax.Expr,
        rest: list[relax.Expr],
        residual: relax.Expr | None = None,
    ) -> relax.Expr:
        """Takes the arguments of this weight off `rest`."""
        n, k = weight["n"], weight["k"]
        fmt = TensorFormat(
            weight["dtype"], weight["bits"], weight["group_size"], weight["zero_point"],
            weight["layout"],
        )  # fmt: skip
        count = len(fmt.parts(n, k)) + bias
        own, rest[:] = rest[:count], rest[count:]
        m = x.ty.shape[0]
        func = _linear(
            fmt, n, k, bias=bias, residual=residual is not None,
            one_row=isinstance(m, tirx.IntImm),
        )  # fmt: skip
        args = [x, *own, *([] if residual is None else [residual])]
        return lowering.call(func, args, [((m, n), "float32")])


def _lower_with_dlight(
    module: tvm.IRModule, names: Sequence[str], limits: GpuLimits
) -> LoweredModel:
    """In place of `targets.gpu.lower_for_gpu`."""
    with tvm.target.Target("webgpu"):
        kept = {kind: handler for kind, handler in gpu_handlers(limits).items()
                if kind in OURS_IN_BOTH}  # fmt: skip
        own = _DlightLowering()
        handlers = {**kept, "linears": own.linears, "linear_add": own.linear_add,
                    "gated_mlp": own.gated_mlp}  # fmt: skip
        lowered = lower_operators(module, names, handlers)
        lowered.module = _schedule_the_rest(lowered.module)
    return lowered


register_tir_pipeline(_PIPELINE, _tir_pipeline)


def build_variants(model: str) -> dict[str, Path]:
    """Name → artifact in the cache's `benchmarks/`, with a library compiled now."""
    folders = {}
    for name in VARIANTS:
        output = _output(name)
        request = BuildRequest(model, "webgpu:cpu-adapter", SCHEME, output)
        with ExitStack() as changed:
            if name == "dlight":
                changed.enter_context(
                    mock.patch.object(webgpu, "lower_for_gpu", _lower_with_dlight)
                )
                changed.enter_context(mock.patch.object(webgpu, "GPU_TIR_PIPELINE", _PIPELINE))
            folders[name] = compile_model(request, lambda *_: None)
    return folders


def built_variants(model: str) -> dict[str, Path]:
    """What `build_variants` has left in the cache. Ends the program if there is nothing."""
    folders = {name: _output(name) / f"{model}-{SCHEME}" for name in VARIANTS}
    for folder in folders.values():
        if not (folder / LIBRARY).is_file():
            sys.exit(f"{folder} has no {LIBRARY}; run once without --built")
    return folders


def _output(name: str) -> Path:
    return cache_dir() / "benchmarks" / "web" / name


def measure(page: Page, prompt: str) -> dict[str, dict[str, Any]]:
    """Phase → kernel → starts and milliseconds."""
    times: dict[str, dict[str, Any]] = page.call("kernel_times", prompt=prompt, timeout_s=600)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--built", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folders = (built_variants if options.built else build_variants)(options.model)
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in VARIANTS}
    if options.output is not None and options.output.is_file():
        rounds = json.loads(options.output.read_bytes())["rounds"]
    facts: dict[str, dict[str, float]] = {}
    with Browser() as browser:
        pages = {}
        for name, folder in folders.items():
            page = browser.open(name, "/tests/kernel_page.html")
            before = browser.call("bytes_sent")
            loaded = page.load(folder, LIBRARY, context=1024)
            facts[name] = {
                "bytes_downloaded": browser.call("bytes_sent") - before,
                "load_ms": loaded["load_ms"],
                "library_bytes": (folder / LIBRARY).stat().st_size,
            }
            pages[name] = page
        adapter = pages["everycast"].call("describe_adapter")
        prompt = _prompt(pages["everycast"], options.prompt_tokens)
        for name, page in pages.items():
            answer = page.call("generate", timeout_s=600, request={
                "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
            })  # fmt: skip
            facts[name]["first_token_ms"] = answer["usage"]["extra"]["time_to_first_token_s"] * 1e3
            facts[name]["ids"] = answer["ids"]
        if facts["dlight"]["ids"] != facts["everycast"]["ids"]:
            sys.exit("the two libraries give different tokens: one of them computes wrong")
        for _ in range(options.rounds):
            for name, page in pages.items():
                rounds[name].append(measure(page, prompt))
    if options.output is not None:
        record = {"adapter": adapter, "facts": facts, "rounds": rounds}
        options.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(_report(options, adapter, facts, rounds))


def _prompt(page: Page, num_tokens: int) -> str:
    words = ["The"]
    while len(page.call("tokenize", text=" ".join(words))) < num_tokens:
        words.append("sea")
    return " ".join(words)


def _report(
    options: argparse.Namespace,
    adapter: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    rounds: Mapping[str, list[dict[str, dict[str, Any]]]],
) -> str:
    lines = [
        f"{options.model} as {SCHEME}, {adapter['vendor']} {adapter['architecture']}, "
        f"{cpu_name()}, {platform.system()}; prompt of {options.prompt_tokens} tokens, medians of "
        f"{len(rounds['everycast'])} rounds",
        "",
        "| ms | dlight | everycast | times faster |",
        "| --- | ---: | ---: | ---: |",
    ]
    for phase in PHASES:
        totals = [
            statistics.median(_total(times[phase]) for times in rounds[name]) for name in VARIANTS
        ]
        lines.append(
            f"| {phase}, all kernels | {totals[0]:.0f} | {totals[1]:.0f} | "
            f"{totals[0] / totals[1]:.1f} |"
        )
    first = [facts[name]["first_token_ms"] for name in VARIANTS]
    lines.append(
        f"| time to first token | {first[0]:.0f} | {first[1]:.0f} | {first[0] / first[1]:.1f} |"
    )
    lines += ["", "| everycast | |", "| --- | ---: |"]
    ours = facts["everycast"]
    lines.append(f"| bytes downloaded | {ours['bytes_downloaded'] / 1e6:.1f} MB |")
    lines.append(f"| library | {ours['library_bytes'] / 1e6:.2f} MB |")
    lines.append(f"| load | {ours['load_ms'] / 1e3:.1f} s |")
    for phase in PHASES:
        lines += ["", f"| {phase}: kernel of everycast | starts | ms |", "| --- | ---: | ---: |"]
        kernels = rounds["everycast"][-1][phase]
        for name, kernel in sorted(kernels.items(), key=lambda item: -item[1]["ms"])[:8]:
            lines.append(f"| `{name}` | {kernel['starts']} | {kernel['ms']:.1f} |")
    return "\n".join(lines)


def _total(kernels: Mapping[str, Mapping[str, Any]]) -> float:
    return float(sum(kernel["ms"] for kernel in kernels.values()))


if __name__ == "__main__":
    main()
