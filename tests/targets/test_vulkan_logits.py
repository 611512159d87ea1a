"""Whole models on a Vulkan device: the logits of every model type are those of the CPU library."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tvm
from everycast.artifact.errors import EverycastError
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.artifact.tensor_format import TensorFormat
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner, query_tiles, slots_of
from everycast.engine.parameters import load_parameters
from everycast.native.vulkan_runtime import load_vulkan_runtime
from everycast.quant_schemes.scheme import SCHEMES, QuantScheme, Role, formats_for
from everycast.schedules.tuning.records import Record, Records, user_file, write_records
from everycast.targets import weights
from everycast.targets.build import BuildRequest, compile_model, open_source
from everycast.targets.gpu import linear_layers
from everycast.targets.library import export_graph
from everycast.targets.target import find_target
from tvm import relax

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-odd": (
        "llama",
        {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 6, "head_dim": 12,
         "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "gemma3": ("gemma3_text", {}),
}  # fmt: skip
NUM_PAGES, LENGTH = 40, 45


@pytest.fixture(scope="module")
def device():
    try:
        load_vulkan_runtime()
    except EverycastError as error:
        pytest.skip(str(error))
    found = tvm.device("vulkan", 0)
    if not found.exist:
        pytest.skip("this machine has no Vulkan device")
    return found


class OnCpu:
    def __init__(self, folder: Path) -> None:
        opened = open_artifact(folder, "cpu")
        parameters = load_parameters(folder, opened.library, TensorCacheReader(folder))
        self.runner = PagedRunner(opened.library, parameters, opened.info, NUM_PAGES)

    def run(self, step: StepInput) -> np.ndarray:
        return self.runner.execute(step).copy()


class OnVulkan:
    def __init__(self, folder: Path, device) -> None:
        self.device = device
        module = tvm.runtime.load_module(str(folder / "lib" / "vulkan.so"))
        self.vm = relax.VirtualMachine(module, device)
        self.metadata = json.loads(str(self.vm["_metadata"]()))
        tensors = TensorCacheReader(folder)
        assert all(p["pack"] is None for p in self.metadata["parameters"])
        names = [p["sources"][0] for p in self.metadata["parameters"]]
        self.parameters = tuple(self.tensor(tensors.read(name)) for name in names)
        layers, _, *rest = self.metadata["page_shape"]
        pages = np.zeros((layers, NUM_PAGES, *rest), self.metadata["kv_dtype"])
        self.pages = tuple(self.tensor(pages) for _ in range(self.metadata["page_tensors"]))

    def tensor(self, array: np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(array), self.device)

    def run(self, step: StepInput) -> np.ndarray:
        tiles = query_tiles(step.query_offsets, self.metadata["query_tile"])
        slots = slots_of(step, self.metadata["page_size"])
        inputs = (step.input_ids, step.positions, slots, tiles, step.block_tables)
        tensors = [self.tensor(array.astype("int32")) for array in inputs]
        hidden, _ = self.vm["forward"](*tensors, self.pages, self.parameters)
        rows = self.tensor(step.logit_rows.astype("int32"))
        return self.vm["logits"](hidden, rows, self.parameters).numpy()


def step_of(*chunks) -> StepInput:
    """chunks: (first page, tokens before, token ids) of each sequence; logits of all."""
    ids = np.concatenate([c[2] for c in chunks]).astype(np.int32)
    positions = np.concatenate([np.arange(c[1], c[1] + len(c[2])) for c in chunks])
    offsets = np.cumsum([0, *(len(c[2]) for c in chunks)]).astype(np.int32)
    tables = np.stack([np.arange(c[0], c[0] + 6) for c in chunks]).astype(np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    return StepInput(ids, positions.astype(np.int32), offsets, tables, rows)


@pytest.mark.parametrize("name", MODELS)
def test_vulkan_gives_the_logits_of_the_cpu(name, device, make_tiny, tmp_path) -> None:
    model_type, overrides = MODELS[name]
    checkpoint = make_tiny(model_type, tmp_path / "model", **overrides)
    for target in ("cpu", "vulkan"):
        request = BuildRequest(str(checkpoint), target, "q0f32", tmp_path / "dist")
        folder = compile_model(request, lambda *_: None)
    cpu, vulkan = OnCpu(folder), OnVulkan(folder, device)
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    for step in (
        step_of((0, 0, ids[:20])),
        step_of((6, 0, ids[:31])),
        step_of((0, 20, ids[20:21]), (12, 0, ids[:33]), (6, 31, ids[31:40]), (18, 0, ids[:1])),
        step_of((0, 21, ids[21:22])),
        step_of((0, 22, ids[22:24]), (12, 33, ids[33:36])),
    ):
        expected, got = cpu.run(step), vulkan.run(step)
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()


def test_gate_and_up_in_different_formats(device, make_tiny, tmp_path, monkeypatch) -> None:
    """As in GGUFs whose quantizer looked at each tensor."""

    def formats(scheme: QuantScheme, roles: Iterable[tuple[str, Role]]) -> dict[str, TensorFormat]:
        found = formats_for(scheme, roles)
        ups = [name for name in found if "up_proj" in name]
        return {**found, **dict.fromkeys(ups, SCHEMES["q8f16_1"].linear)}

    monkeypatch.setattr(weights, "formats_for", formats)
    checkpoint = make_tiny("llama", tmp_path / "model", mlp_bias=True)
    for target in ("cpu", "vulkan"):
        request = BuildRequest(
            str(checkpoint), target, "q4f16_1", tmp_path / "dist",
            activations="float32" if target == "cpu" else "auto",
        )  # fmt: skip
        folder = compile_model(request, lambda *_: None)
    cpu, vulkan = OnCpu(folder), OnVulkan(folder, device)
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    for step in (step_of((0, 0, ids[:33])), step_of((0, 33, ids[33:34]))):
        expected, got = cpu.run(step), vulkan.run(step)
        assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


def test_tuned_linear_layers_give_the_same_logits(device, make_tiny, tmp_path, monkeypatch) -> None:
    """Records of all layers, with other kernels for every number of rows."""
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path))
    checkpoint = make_tiny("llama", tmp_path / "model")

    def compiled(folder: str, devices: dict[str, str]) -> OnVulkan:
        asked = BuildRequest(
            str(checkpoint), "vulkan", "q4f16_1", tmp_path / folder, devices=devices
        )
        return OnVulkan(compile_model(asked, lambda *_: None), device)

    source = open_source(BuildRequest(str(checkpoint), "vulkan", "q4f16_1", tmp_path), print)
    graph = export_graph(source.config, source.plan.formats, "float16")
    records = Records("vulkan-x")
    for layer in linear_layers(*graph, find_target("vulkan")):
        records.add(layer.name, "one", Record({"shares_memory": 0}, 1, 2.0, 1.0))
        records.add(layer.name, "few", Record({"gemv_tokens": 2, "gemv_lanes": 8}, 1, 2.0, 1.0))
        records.add(layer.name, "many", Record({"tile_rows": 32}, 1, 2.0, 1.0))
    write_records(user_file("vulkan-x"), records)
    default, tuned = compiled("default", {}), compiled("tuned", {"vulkan": "vulkan-x"})
    assert default.metadata["schedules"]["tuned"] == 0
    assert tuned.metadata["schedules"]["tuned"] == 9  # four of each layer, and the head
    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    for step in (
        step_of((0, 0, ids[:31])),
        step_of((0, 31, ids[31:32])),
        step_of((0, 32, ids[32:35])),
    ):
        expected, got = default.run(step), tuned.run(step)
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
