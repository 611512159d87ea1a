import io
import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.errors import CapacityError, CheckpointError, CompileError
from everycast.artifact.manifest import read_manifest
from everycast.artifact.tensor_cache import TensorCacheReader
from everycast.targets import build
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.library import BuiltLibrary

METADATA = {
    "prefill_chunk_size": 512, "max_num_sequence": 64, "page_size": 16, "kv_dtype": "float16",
    "page_tensors": 1, "page_shape": [2, -1, 4, 256],
    "schedules": {"tuned": 1, "hand": 20, "default": 2},
}  # fmt: skip


class Compiler:
    """Stands in for `build_library`: counts its calls, writes a file, or fails."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.row_parts: dict[str, list[int]] | None = None

    def __call__(
        self, config: Any, formats: Any, target: Any, path: Path, **options: Any
    ) -> BuiltLibrary:
        self.calls.append({"path": path, **options})
        if self.error is not None:
            raise self.error
        path.write_bytes(b"library " + str(len(self.calls)).encode())
        return BuiltLibrary(METADATA, {"forward": 1000, "logits": 10}, self.row_parts)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(build, "build_library", compiler)
    return compiler


@pytest.fixture
def source(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to change."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "模型 a'b")


def request(source: Path, target: str | None = "cpu", **options: Any) -> BuildRequest:
    output = source.parent / "dist"
    return BuildRequest(str(source), target, options.pop("quantization", None), output, **options)


def run(request: BuildRequest) -> Path:
    return compile_model(request, lambda *_: None)


def test_a_new_artifact(source: Path, compiler: Compiler) -> None:
    reports: list[tuple[str, int, int, str]] = []
    folder = compile_model(request(source), lambda *report: reports.append(report))
    manifest = read_manifest(folder)
    assert folder.name == f"模型 a'b-{manifest.weights.quantization}"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    assert manifest.weights.weights_hash == TensorCacheReader(folder).weights_hash()
    stamp = manifest.libraries["cpu"]
    assert (folder / stamp.file).read_bytes() == b"library 1"
    assert stamp.limits.page_bytes == 2 * 4 * 256 * 2
    assert stamp.function_memory_bytes == {"forward": 1000, "logits": 10}
    assert stamp.schedules == {"tuned": 1, "hand": 20, "default": 2}
    stages = [report[0] for report in reports]
    assert stages[0] == "open" and {"weights", "compile"} < set(stages)
    done, total = [r[1:3] for r in reports if r[0] == "weights"][-1]
    assert done == total > 0


def test_sampling_advice_reaches_the_chat_config(source: Path, compiler: Compiler) -> None:
    config = json.loads((run(request(source)) / "mlc-chat-config.json").read_bytes())
    assert {"temperature": 0.6, "top_p": 0.9, "top_k": 20}.items() <= config.items()


def test_weights_that_are_there_are_kept(source: Path, compiler: Compiler) -> None:
    folder = run(request(source, None))
    assert not compiler.calls and read_manifest(folder).libraries == {}
    shard = folder / "params_shard_0.bin"
    before = shard.stat().st_mtime_ns
    run(request(source))
    run(request(source, "cpu:x86-64-v3"))
    assert shard.stat().st_mtime_ns == before
    assert set(read_manifest(folder).libraries) == {"cpu", "cpu:x86-64-v3"}
    assert sorted(path.name for path in (folder / "lib").iterdir()) == [
        "cpu-x86-64-v3.so",
        "cpu.so",
    ]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_are_listed_as_a_library_takes_them(
    source: Path, compiler: Compiler, is_first: bool
) -> None:
    """By whichever library it is wanted, and later ones that do not mind leave it so."""
    folder = run(request(source, "cpu" if is_first else None, quantization="q0f32"))
    name = "model.embed_tokens.weight"
    compiler.row_parts = {name: [100, 220]}
    folder = run(request(source, "cpu:x86-64-v3", quantization="q0f32"))
    assert read_manifest(folder).weights.weights_hash == TensorCacheReader(folder).weights_hash()
    compiler.row_parts = None
    run(request(source, "cpu:x86-64-v4", quantization="q0f32"))
    document = json.loads((folder / "tensor-cache.json").read_bytes())
    shapes = {r["name"]: r["shape"] for shard in document["records"] for r in shard["records"]}
    assert shapes[f"{name}.part0"][0] == 100 and shapes[f"{name}.part1"][0] == 220
    assert name not in shapes and TensorCacheReader(folder).info(name).shape[0] == 320
    assert len(compiler.calls) == 2 + is_first


@pytest.mark.parametrize("change", ["source", "weights", "manifest", "version"])
def test_what_changed_is_built_anew(
    source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = run(request(source))
    (folder / "witness").touch()
    if change == "source":
        (source / "config.json").touch()
    elif change == "weights":
        (folder / "tensor-cache.json").write_text("{}")
    elif change == "manifest":
        (folder / "everycast.json").write_text("{}")
    else:
        versions = build.running_versions()
        newer = type(versions)("99", versions.tvm, versions.tvm_ffi)
        monkeypatch.setattr(build, "running_versions", lambda: newer)
    assert run(request(source)) == folder
    assert not (folder / "witness").exists()


@pytest.mark.parametrize("error", [CompileError("no"), KeyboardInterrupt(), MemoryError()])
def test_a_failed_build_leaves_nothing_and_takes_nothing(
    source: Path, compiler: Compiler, error: BaseException
) -> None:
    output = source.parent / "dist"
    compiler.error = error
    with pytest.raises(type(error)):
        run(request(source))
    assert list(output.iterdir()) == []
    compiler.error = None
    folder = run(request(source))
    compiler.error = error
    with pytest.raises(type(error)):
        run(request(source, "cpu:x86-64-v3"))
    assert [path.name for path in output.iterdir()] == [folder.name]
    assert set(read_manifest(folder).libraries) == {"cpu"} and not list(folder.glob(".*"))


def test_the_weights_stop_when_the_compiler_fails(
    source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after gigabytes more."""
    tensors = build.stored_tensors
    written = []

    def slow(*arguments: Any) -> Any:
        for parameter, parts in tensors(*arguments):
            failed.wait(10)
            written.append(parameter)
            yield parameter, parts

    failed = threading.Event()

    class Fails(Compiler):
        def __call__(self, *arguments: Any, **options: Any) -> BuiltLibrary:
            threading.Timer(0.1, failed.set).start()
            raise CompileError("no")

    monkeypatch.setattr(build, "stored_tensors", slow)
    monkeypatch.setattr(build, "build_library", Fails())
    with pytest.raises(CompileError):
        run(request(source))
    assert len(written) == 1


def test_bad_weights_are_told_after_a_good_compile(source: Path, compiler: Compiler) -> None:
    import safetensors.numpy

    file = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        run(request(source))
    assert list((source.parent / "dist").iterdir()) == []


def test_a_context_beyond_the_model_is_refused(source: Path, compiler: Compiler) -> None:
    with pytest.raises(CapacityError, match="context_window_size 257 is more than the model's 256"):
        run(request(source, context_window_size=257))
    run(request(source, context_window_size=64))
    assert compiler.calls[-1]["context_window_size"] == 64


def test_a_full_disk_is_found_out_first(
    source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1_000_000))
    with pytest.raises(CapacityError, match=r"needs \d+ MB on disk, but .* has 1 MB free"):
        run(request(source))
    assert not compiler.calls and not (source.parent / "dist").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HF://HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("hf://org/name@v1.0/", "name"),
        ("some/file.gguf", "here"),
    ],
)
def test_names_of_artifacts(model: str, name: str) -> None:
    checkpoint: Any = namedtuple("checkpoint", "path")(Path("/models/here.gguf"))
    assert build._name(model, checkpoint) == name


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`child(compile_model)`: the exit code and answers of a child that builds with this."""
    monkeypatch.delenv("EVERYCAST_DEBUG", raising=False)

    def run(compile_model: Any) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(build, "compile_model", compile_model)
        values = {"model": "m", "target": None, "quantization": None, "output": "/o"}
        answers = io.BytesIO()
        code = build.answer_request(json.dumps({**values, "dump_ir": None}), answers)
        return code, [json.loads(line) for line in answers.getvalue().splitlines()]

    return run


def test_the_child_answers_progress_and_the_folder(child: Any) -> None:
    def compile_model(request: BuildRequest, report: Any) -> Path:
        assert request.output == Path("/o") and request.activations == "auto"
        report("weights", 1, 2, "bytes")
        return Path("/o/模型")

    assert child(compile_model) == (
        0,
        [
            {"progress": {"stage": "weights", "done": 1, "total": 2, "unit": "bytes"}},
            {"artifact": "/o/模型"},
        ],
    )


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (CheckpointError("no such tensor"), "CheckpointError", "no such tensor"),
        (MemoryError(), "CapacityError", "not enough memory"),
        (PermissionError(13, "denied", "/x"), "CompileError", "/x"),
        (RuntimeError("first\nsecond"), "CompileError", "unexpected RuntimeError: first while"),
    ],
)
def test_the_child_answers_every_error_in_one_line(
    child: Any, error: Exception, kind: str, message: str
) -> None:
    def compile_model(*_: Any) -> Path:
        raise error

    code, ((answer),) = child(compile_model)
    assert code == 2 and answer["error"]["type"] == kind
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError])
def test_a_child_that_nobody_waits_for_is_silent(child: Any, end: type[BaseException]) -> None:
    def compile_model(*_: Any) -> Path:
        raise end

    assert child(compile_model) == (130, [])
