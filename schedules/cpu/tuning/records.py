"""Files of what tuning found, one for each CPU.

    {"version": 1, "cpu": "znver4-0f1e2d3c", "operators": {
        "<name of an operator>": {
            "many": {"parameters": {"tile_tokens": 16}, "trials": 24, "default_us": 1540.2,
                     "tuned_us": 1473.9}, …

Buckets of tokens are those of `linear_schedule`. Without parameters the default was the fastest.
Records that come with everycast lie in `schedules/tuned`, the user's in the cache folder; where
both have a record, the user's counts.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm.target.codegen import llvm_get_cpu_features

from ....artifact.cache import cache_dir
from ....artifact.errors import CompileError
from ....artifact.files import atomic_write, disk_errors
from ....artifact.json_fields import from_json
from ..isa import CpuIsa
from ..linear_operator import LinearOperator
from ..linear_schedule import Bucket, LinearSchedule

VERSION = 1
"""To be raised when the kernels change so much that what was found no longer holds."""
SHIPPED = Path(__file__).parents[2] / "tuned"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """What was found for an operator and a bucket of tokens; times are of one call."""

    parameters: dict[str, int]
    trials: int
    default_us: float
    tuned_us: float


@dataclass(slots=True)
class Records:
    """Records of one CPU: operator's name → bucket → record."""

    cpu: str
    operators: dict[str, dict[str, Record]] = field(default_factory=dict)
    version: int = VERSION

    def find(self, operator: LinearOperator, bucket: Bucket) -> Record | None:
        return self.operators.get(operator.name, {}).get(bucket)

    def add(self, operator: LinearOperator, bucket: Bucket, record: Record) -> None:
        self.operators.setdefault(operator.name, {})[bucket] = record

    def schedule(self, operator: LinearOperator, isa: CpuIsa) -> LinearSchedule:
        """The operator's schedule: what was found, the default elsewhere."""
        schedule = operator.default_schedule(isa)
        for record in self.operators.get(operator.name, {}).values():
            schedule = schedule.with_parameters(record.parameters)
        return schedule

    def over(self, other: "Records") -> "Records":
        """These, and those of `other` where there are none."""
        names = [*other.operators, *(n for n in self.operators if n not in other.operators)]
        merged = {n: other.operators.get(n, {}) | self.operators.get(n, {}) for n in names}
        return Records(self.cpu, merged)


def cpu_name(target: tvm.target.Target) -> str:
    """Names a CPU by LLVM's name and a hash of its features: another machine's never fits."""
    features = sorted(str(name) for name in llvm_get_cpu_features(target))
    digest = hashlib.sha256(" ".join(features).encode()).hexdigest()[:8]
    return f"{target.attrs['mcpu']}-{digest}"


def user_file(cpu: str) -> Path:
    return cache_dir() / "tuned" / f"{cpu}.json"


def read_records(path: Path, cpu: str) -> Records:
    """The records in a file; none if there is no such file, or with a warning if they are of
    another version. CompileError if it is damaged or of another CPU."""
    try:
        document: Any = json.loads(path.read_bytes())
        if isinstance(document, dict) and document.get("version") != VERSION:
            logger.warning("%s is of another version and is not used; tune again", path)
            return Records(cpu)
        records = from_json(Records, document)
        for record in (r for buckets in records.operators.values() for r in buckets.values()):
            LinearSchedule(tile_tokens=1).with_parameters(record.parameters)
    except FileNotFoundError:
        return Records(cpu)
    except (OSError, ValueError) as error:
        raise CompileError(
            f"cannot read tuning records in {path}: {error}; delete the file and tune again"
        ) from None
    if records.cpu != cpu:
        raise CompileError(f"{path} holds records of {records.cpu}, not of {cpu}; delete the file")
    return records


def all_records(cpu: str) -> Records:
    """The user's records over those that come with everycast."""
    shipped = read_records(SHIPPED / f"{cpu}.json", cpu)
    return read_records(user_file(cpu), cpu).over(shipped)


def write_records(path: Path, records: Records) -> None:
    """Replace the file in one step."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(records), indent=1, sort_keys=True)
    atomic_write(path, text.encode() + b"\n")
