"""Caches whose JSON lists tensors in parts: as WebLLM sees them, and as we do."""

import json
from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError
from everycast.artifact.tensor_cache import (
    TENSOR_CACHE_JSON,
    TensorCacheReader,
    TensorCacheWriter,
    list_in_parts,
)
from everycast.artifact.tensor_parts import part_name

PARTS = {"embed.q_weight": [3, 3, 1], "embed.q_scale": [3, 3, 1]}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "norm": rng.standard_normal(5).astype(np.float32),
        "embed.q_weight": rng.integers(0, 1 << 32, (7, 6), dtype=np.uint32),
        "embed.q_scale": rng.standard_normal((7, 2)).astype(np.float16),
        "last": rng.standard_normal((2, 3)).astype(np.float32),
    }


@pytest.fixture
def cache(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    with TensorCacheWriter(tmp_path, shard_bytes=256) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
    return tmp_path


def records(cache: Path) -> list[dict]:
    """What WebLLM loads: every record of every shard."""
    document = json.loads((cache / TENSOR_CACHE_JSON).read_bytes())
    return [
        {**record, "shard": shard["dataPath"]}
        for shard in document["records"]
        for record in shard["records"]
    ]


def edit(cache: Path, change) -> None:
    path = cache / TENSOR_CACHE_JSON
    document = json.loads(path.read_bytes())
    for shard in document["records"]:
        change(shard["records"])
    path.write_text(json.dumps(document))


def test_parts_are_the_rows_and_other_records_stay(cache: Path, arrays) -> None:
    before = records(cache)
    list_in_parts(cache, PARTS)
    found = {record["name"]: record for record in records(cache)}
    assert [name for name in found if "embed" not in name] == ["norm", "last"]
    assert [record for record in before if "embed" not in record["name"]] == [
        found["norm"], found["last"],
    ]  # fmt: skip
    for name, rows in PARTS.items():
        read = []
        for index, count in enumerate(rows):
            record = found[part_name(name, index)]
            shape = (count, arrays[name].shape[1])
            assert record["shape"] == list(shape)
            data = (cache / record["shard"]).read_bytes()[record["byteOffset"] :]
            dtype = arrays[name].dtype
            read.append(np.frombuffer(data[: record["nbytes"]], dtype).reshape(shape))
        np.testing.assert_array_equal(np.concatenate(read), arrays[name])


def test_the_reader_gives_whole_tensors(cache: Path, arrays) -> None:
    whole = TensorCacheReader(cache)
    assert whole.largest_record_bytes == 7 * 6 * 4
    list_in_parts(cache, PARTS)
    listed = TensorCacheReader(cache)
    assert listed.names == tuple(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(listed.read(name), array)
        assert listed.info(name) == whole.info(name)
    assert listed.largest_record_bytes == 3 * 6 * 4
    assert listed.weights_hash() == whole.weights_hash()
    assert listed.layout_hash() == whole.layout_hash()


def test_other_parts_replace_the_first_ones(cache: Path) -> None:
    before = (cache / TENSOR_CACHE_JSON).read_bytes()
    list_in_parts(cache, PARTS)
    once = (cache / TENSOR_CACHE_JSON).read_bytes()
    list_in_parts(cache, PARTS)
    assert (cache / TENSOR_CACHE_JSON).read_bytes() == once
    list_in_parts(cache, {"embed.q_weight": [6, 1]})
    names = [record["name"] for record in records(cache)]
    parts = [part_name("embed.q_weight", index) for index in range(2)]
    assert names == ["norm", *parts, "embed.q_scale", "last"]
    list_in_parts(cache, {})
    assert (cache / TENSOR_CACHE_JSON).read_bytes() == before


def test_parts_must_be_all_rows(cache: Path) -> None:
    for rows in ([3, 3], [7, 0], [8, -1]):
        with pytest.raises(ArtifactError, match=r"embed\.q_weight has 7 rows, not"):
            list_in_parts(cache, {"embed.q_weight": rows})
    (cache / TENSOR_CACHE_JSON).unlink()
    with pytest.raises(ArtifactError, match="build it again"):
        list_in_parts(cache, PARTS)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(byteOffset=record["byteOffset"] + 4),
        lambda record: record.update(shape=[*record["shape"], 1]),
        lambda record: record.update(dtype="float32"),
        lambda record: record.update(name="embed.q_weight.part7"),
    ],
)
def test_parts_that_do_not_fit_together_are_damage(cache: Path, number: int, damage) -> None:
    list_in_parts(cache, PARTS)

    def change(found: list[dict]) -> None:
        for record in found:
            if record["name"] == part_name("embed.q_weight", number):
                damage(record)

    edit(cache, change)
    with pytest.raises(ArtifactError, match="is damaged"):
        TensorCacheReader(cache)
