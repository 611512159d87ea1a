"""A whole model with CUDA's and Metal's kernels, emulated: the logits of the CPU library."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner
from everycast.engine.parameters import load_parameters
from everycast.targets import build, cuda, metal
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.gpu import gpu_target, this_machine
from everycast.targets.library import export_graph
from everycast.targets.target import find_target

LENGTH, NUM_PAGES = 45, 12


class Compiled:
    """A library that runs in this process, driven as the engine does."""

    def __init__(self, folder: Path) -> None:
        opened = open_artifact(folder, "cpu")
        parameters = load_parameters(folder, opened.library, TensorCacheReader(folder))
        self.runner = PagedRunner(opened.library, parameters, opened.info, NUM_PAGES)

    def run(self, ids: np.ndarray, past: int) -> np.ndarray:
        """The logits of `ids`, which follow `past` tokens of the same sequence."""
        positions = np.arange(past, past + len(ids), dtype=np.int32)
        offsets = np.array([0, len(ids)], np.int32)
        tables = np.arange(6, dtype=np.int32)[None]
        rows = np.arange(len(ids), dtype=np.int32)
        step = StepInput(ids.astype(np.int32), positions, offsets, tables, rows)
        return self.runner.execute(step).copy()


@pytest.fixture(scope="module", params=["cuda", "metal"])
def emulated_target(request):
    """(a target with a host part for this process' memory, its kernels)."""
    emulator = request.getfixturevalue(f"{request.param}_emulator")
    spec = {name: value for name, value in emulator.SPEC.items() if name != "host"}
    limits = {"cuda": cuda._LIMITS, "metal": metal._LIMITS}[request.param]
    target = gpu_target(request.param, spec, limits, this_machine())
    kernels = emulator.EmulatedLibrary()
    # The engine takes it for a library that runs in its process; sampling is the CPU's.
    cpu = find_target("cpu")
    changed = {
        "name": "cpu",
        "tir_pipeline": kernels.PIPELINE,
        "constants": cpu.constants,
        "page_tensors": cpu.page_tensors,
        "model_constants": lambda c: {**cpu.model_constants(c), **target.model_constants(c)},
        "sampling_functions": cpu.sampling_functions,
    }
    return dataclasses.replace(target, **changed), kernels


@pytest.fixture(scope="module")
def reference(make_tiny, tmp_path_factory):
    """(a small checkpoint, its library for the CPU)."""
    path = tmp_path_factory.mktemp("model")
    folder = make_tiny("llama", path / "tiny", attention_bias=True, mlp_bias=True)
    request = BuildRequest(str(folder), "cpu", "q4f16_1", path / "cpu", activations="float32")
    return folder, Compiled(compile_model(request, lambda *_: None))


def test_logits(reference, emulated_target, tmp_path, monkeypatch):
    target, kernels = emulated_target
    folder, expected = reference
    monkeypatch.setattr(build, "find_target", lambda *_, **__: target)
    request = BuildRequest(str(folder), "cpu", "q4f16_1", tmp_path / "gpu")
    artifact = compile_model(request, lambda *_: None)
    kernels.attach()
    got = Compiled(artifact)

    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    for first, last in ((0, 20), (20, 37), (37, 38), (38, 40), (40, LENGTH)):
        wanted = expected.run(ids[first:last], first)
        logits = got.run(ids[first:last], first)
        assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 5e-3, (first, last)
    assert sum(count for name, count in kernels.launches.items() if "half_rows" in name) > 10


@pytest.mark.parametrize(("kv_dtype", "has_halves"), [("float16", True), ("float32", False)])
def test_float32_models_are_not_rounded_to_halves(
    make_tiny, emulated_target, tmp_path, kv_dtype, has_halves
):
    request = BuildRequest(str(make_tiny("llama", tmp_path)), "cpu", "q4f32_1", tmp_path)
    source = build.open_source(request, lambda *_: None)
    graph = export_graph(source.config, source.plan.formats, kv_dtype)
    lowered = emulated_target[0].lower(*graph)
    names = [variable.name_hint for variable in lowered.module.functions]
    assert any("half_rows" in name for name in names) == has_halves
