"""What tuning found for this CPU or another one, as schedules."""

import hashlib
from collections.abc import Mapping

import tvm
from tvm.target.codegen import llvm_get_cpu_features

from ...tuning.records import Records, all_records
from ..isa import CpuIsa
from ..linear_operator import LinearOperator
from ..linear_schedule import LinearSchedule


def cpu_name(target: tvm.target.Target) -> str:
    """Names a CPU by LLVM's name and a hash of its features: another machine's never fits."""
    features = sorted(str(name) for name in llvm_get_cpu_features(target))
    digest = hashlib.sha256(" ".join(features).encode()).hexdigest()[:8]
    return f"{target.attrs['mcpu']}-{digest}"


def check_parameters(bucket: str, parameters: Mapping[str, int]) -> None:
    """ValueError for parameters that no kernel has."""
    LinearSchedule(tile_tokens=1).with_parameters(parameters)


def cpu_records(cpu: str) -> Records:
    """All records of a CPU that `cpu_name` names."""
    return all_records(cpu, check_parameters)


def tuned_schedule(records: Records, operator: LinearOperator, isa: CpuIsa) -> LinearSchedule:
    """The operator's schedule: what was found, the default elsewhere."""
    schedule = operator.default_schedule(isa)
    for record in records.of(operator.name).values():
        schedule = schedule.with_parameters(record.parameters)
    return schedule
