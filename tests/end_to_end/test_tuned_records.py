"""`everycast compile` with what tuning found on this machine: other code, the same bits."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.schedules.tuning.records import Record, Records, write_records
from everycast.targets.tuning import TuneRequest, Tuning

FOUND = {
    "many": {"tile_tokens": 3, "chunk_bytes": 1 << 17, "prefetch_many": 0},
    "few": {"prefetch_few": 1024},
    "one": {"prefetch_one": 2048},
}
IDS = np.random.default_rng(0).integers(0, 300, 100, np.int32)


def test_compile_applies_the_users_records(
    tiny: Path,
    built: Any,
    compiled: Callable[[Path], Any],
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    request = TuneRequest(str(tiny), "cpu", None, "auto", None, trials=3, minutes=None)
    tuning = Tuning(request, lambda done, total: None)
    *found, left = [operator.name for operator in tuning.operators]
    record = {bucket: Record(values, 3, 10.0, 9.0) for bucket, values in FOUND.items()}
    write_records(tuning.file, Records(tuning.device, dict.fromkeys(found, record)))

    result = run("compile", tiny, "-o", tmp_path / "dist")
    assert result.code == 0, result.err
    counts = re.search(r"schedules of operators: (\d+) tuned, (\d+) hand, 0 default", result.err)
    assert counts is not None, result.err
    # Each layer's operators count; the one that has no record is not among them.
    assert left not in found and int(counts[1]) >= len(found) and int(counts[2]) > 0

    (folder,) = (tmp_path / "dist").iterdir()
    tuned, default = (folder / "lib" / "cpu.so"), (built.folder / "lib" / "cpu.so")
    assert tuned.read_bytes() != default.read_bytes()
    models = compiled(folder), compiled(built.folder)
    for ids in (IDS, IDS[:7], IDS[:3], IDS[:1]):
        ours, theirs = (model.logits(ids) for model in models)
        assert ours.any() and np.array_equal(ours.view(np.int32), theirs.view(np.int32))
