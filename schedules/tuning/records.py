"""Files of what tuning found, one for each CPU or other device.

    {"version": 2, "device": "znver4-0f1e2d3c", "operators": {
        "<name of an operator>": {
            "many": {"parameters": {"tile_tokens": 16}, "trials": 24, "default_us": 1540.2,
                     "tuned_us": 1473.9}, …

A file is named by its device. Without parameters the default was the fastest. Records that come
with everycast lie in `schedules/tuned`, the user's in the cache folder; where both have a record,
the user's counts.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...artifact import tuning
from ...artifact.errors import CompileError
from ...artifact.files import atomic_write, disk_errors
from ...artifact.json_fields import from_json

VERSION = 2
"""To be raised when the kernels change so much that what was found no longer holds."""

logger = logging.getLogger(__name__)

Check = Callable[[str, Mapping[str, int]], object]
"""(bucket, parameters): ValueError for parameters that no kernel has."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was found for an operator and a bucket of tokens; times are of one call."""

    parameters: dict[str, int]
    trials: int
    default_us: float
    tuned_us: float

    @property
    def speedup(self) -> float:
        """Over the default."""
        return self.default_us / self.tuned_us


@dataclass(slots=True)
class Records:
    """Records of one device: operator's name → bucket → record."""

    device: str
    operators: dict[str, dict[str, Record]] = field(default_factory=dict)
    version: int = VERSION

    def find(self, operator: str, bucket: str) -> Record | None:
        return self.operators.get(operator, {}).get(bucket)

    def of(self, operator: str) -> Mapping[str, Record]:
        """Bucket → record."""
        return self.operators.get(operator, {})

    def add(self, operator: str, bucket: str, record: Record) -> None:
        self.operators.setdefault(operator, {})[bucket] = record

    def over(self, other: "Records") -> "Records":
        """These, and those of `other` where there are none."""
        names = [*other.operators, *(n for n in self.operators if n not in other.operators)]
        merged = {n: other.operators.get(n, {}) | self.operators.get(n, {}) for n in names}
        return Records(self.device, merged)


def user_file(device: str) -> Path:
    return tuning.user_folder() / f"{device}.json"


def read_records(path: Path, device: str, check: Check) -> Records:
    """The records in a file; none if there is no such file, or with a warning if they are of
    another version. CompileError if it is damaged or of another device."""
    try:
        document: Any = json.loads(path.read_bytes())
        if isinstance(document, dict) and document.get("version") != VERSION:
            logger.warning("%s is of another version and is not used; tune again", path)
            return Records(device)
        records = from_json(Records, document)
        for buckets in records.operators.values():
            for bucket, record in buckets.items():
                check(bucket, record.parameters)
    except FileNotFoundError:
        return Records(device)
    except (OSError, ValueError) as error:
        raise CompileError(
            f"cannot read tuning records in {path}: {error}; delete the file and tune again"
        ) from None
    if records.device != device:
        raise CompileError(
            f"{path} holds records of {records.device}, not of {device}; delete the file"
        )
    return records


def all_records(device: str, check: Check) -> Records:
    """The user's records over those that come with everycast."""
    shipped = read_records(tuning.SHIPPED / f"{device}.json", device, check)
    return read_records(user_file(device), device, check).over(shipped)


def write_records(path: Path, records: Records) -> None:
    """Replace the file in one step."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(records), indent=1, sort_keys=True)
    atomic_write(path, text.encode() + b"\n")
