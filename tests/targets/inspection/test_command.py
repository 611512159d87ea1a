"""`everycast inspect` from the command line, as far as it is more than the tools."""

import json
import shutil
from pathlib import Path

import pytest
from everycast import inspect_command
from everycast.artifact.errors import ArtifactError
from everycast.targets.inspection import artifact
from everycast.targets.inspection.report import Finding, KernelUse, LibraryReport, ToolMissing


def test_tables_and_json(tiny_artifact: Path, tmp_path: Path, capsys) -> None:
    assert inspect_command.run_inspect(tiny_artifact, tmp_path / "all.json")
    shown = capsys.readouterr().out
    assert "cpu: lib/cpu.so, " in shown and "sample_from_logits" in shown
    (record,) = json.loads((tmp_path / "all.json").read_text())
    assert record["target"] == "cpu" and record["missing"] is None
    names = {kernel["name"] for kernel in record["finding"]["kernels"]}
    assert "sample_from_logits" in names and record["num_bytes"] > 10_000


def test_what_is_wrong_and_what_is_missing(monkeypatch, capsys) -> None:
    uses = (
        KernelUse("k", "sm_80", registers=12, spills=0),
        KernelUse("k", "sm_90", registers=40, spills=None),
    )
    reports = [
        LibraryReport("cuda", "lib/cuda.so", "linux-x86_64", 2_000_000, Finding("tool 1", uses)),
        LibraryReport(
            "metal", "lib/metal.dylib", "macos-aarch64", 5, Finding("", (), (), ("bad",))
        ),
        LibraryReport("rocm", "lib/rocm.so", "linux-x86_64", 5, None, "no reader; run: x"),
    ]
    monkeypatch.setattr(artifact, "inspect_artifact", lambda folder: reports)
    assert not inspect_command.run_inspect(Path(), None)
    shown = capsys.readouterr().out
    assert "cuda: lib/cuda.so, 2 MB, 1 kernels, read by tool 1" in shown and "12-40" in shown
    assert "WRONG: bad" in shown and "not inspected: no reader; run: x" in shown


def test_a_missing_tool_and_a_broken_library(tiny_artifact: Path, monkeypatch) -> None:
    def missing(*_: object) -> Finding:
        raise ToolMissing("no reader; run: x")

    monkeypatch.setattr(artifact.cpu, "inspect", missing)
    (report,) = artifact.inspect_artifact(tiny_artifact)
    assert report.finding is None and report.missing == "no reader; run: x"

    def broken(path: Path) -> None:
        raise ValueError("it is no library that TVM wrote")

    monkeypatch.setattr(artifact, "read_library", broken)
    (report,) = artifact.inspect_artifact(tiny_artifact)
    assert report.finding.faults == ("it is no library that TVM wrote",)


def test_other_folders_and_damaged_libraries(tiny_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not an everycast artifact"):
        inspect_command.run_inspect(tmp_path, None)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    with (copy / "lib" / "cpu.so").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match="is corrupted"):
        inspect_command.run_inspect(copy, None)


def test_targets_that_no_tool_reads() -> None:
    with pytest.raises(ToolMissing, match="libraries for tpu are not read by this version"):
        artifact._inspect("tpu", Path("library.so"))
