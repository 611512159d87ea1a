"""Tensors that `tensor-cache.json` lists in parts, each some of the rows.

Browsers bind no more than 128 MB of a buffer, and WebLLM makes a buffer of every record: a larger
tensor is listed as records over the same bytes, which lie one after another. `part_of` is ours, and
other readers pass it over:

    {"name": "w", "shape": [5, 8], …}   ↔   {"name": "w.part0", "shape": [3, 8], "part_of": "w", …},
                                            {"name": "w.part1", "shape": [2, 8], "part_of": "w", …}
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PART_OF = "part_of"

Record = dict[str, Any]


def part_name(name: str, index: int) -> str:
    """The name of a part of the tensor `name`."""
    return f"{name}.part{index}"


def joined(records: Sequence[Record]) -> Iterator[Record]:
    """A shard's records with every tensor in one. ValueError if parts do not follow each other."""
    whole: Record | None = None
    count = 0
    for record in records:
        name = record.get(_PART_OF)
        if whole is not None and name == whole["name"]:
            _check_follows(record, whole, count)
            whole["shape"] = [whole["shape"][0] + record["shape"][0], *whole["shape"][1:]]
            whole["nbytes"] += record["nbytes"]
            count += 1
            continue
        if whole is not None:
            yield whole
            whole = None
        if name is None:
            yield record
            continue
        if record["name"] != part_name(name, 0):
            raise ValueError(f"tensor {name} begins with {record['name']}")
        whole, count = {**record, "name": name}, 1
        del whole[_PART_OF]
    if whole is not None:
        yield whole


def split(record: Record, rows: Sequence[int]) -> Iterator[Record]:
    """A tensor's record in parts of so many rows. ValueError if those are not all rows."""
    num_rows, *rest = record["shape"]
    if sum(rows) != num_rows or min(rows) < 1:
        raise ValueError(f"tensor {record['name']} has {num_rows} rows, not {rows}")
    row_bytes, offset = record["nbytes"] // num_rows, record["byteOffset"]
    for index, count in enumerate(rows):
        yield {
            **record,
            "name": part_name(record["name"], index),
            "shape": [count, *rest],
            "nbytes": count * row_bytes,
            "byteOffset": offset,
            _PART_OF: record["name"],
        }
        offset += count * row_bytes


def in_parts(records: Sequence[Record], parts: Mapping[str, Sequence[int]]) -> list[Record]:
    """A shard's records with the tensors that `parts` names in parts of so many rows, and all
    others whole."""
    found: list[Record] = []
    for record in joined(records):
        rows = parts.get(record["name"])
        found += [record] if rows is None else split(record, rows)
    return found


def _check_follows(record: Record, whole: Record, count: int) -> None:
    expected = {
        "name": part_name(whole["name"], count),
        "dtype": whole["dtype"],
        "format": whole["format"],
        "byteOffset": whole["byteOffset"] + whole["nbytes"],
    }
    if any(record[key] != value for key, value in expected.items()) or (
        record["shape"][1:] != whole["shape"][1:]
    ):
        raise ValueError(f"tensor {record['name']} does not follow what is before it")
