"""What tuning found for a device, as schedules of its linear layers."""

from ....artifact.errors import CompileError
from ...tuning.records import Records, all_records
from ..limits import GpuLimits
from ..linear_operator import LinearOperator
from ..linear_schedule import LinearSchedule, check_parameters, default_schedule
from ..matrix_gemm import can_use_matrices


def record_name(operator: LinearOperator, limits: GpuLimits) -> str:
    """What records of an operator are kept under: its kernels' name, and whether many rows are
    multiplied as halves."""
    return f"{operator.name}-halves" if can_use_matrices(operator, limits) else operator.name


def device_records(device: str) -> Records:
    """All records of a device that `everycast.tuned_devices` names."""
    return all_records(device, check_parameters)


def tuned_schedule(records: Records, operator: LinearOperator, limits: GpuLimits) -> LinearSchedule:
    """The operator's schedule: what was found, the target's limits elsewhere.

    CompileError for a record that the target's limits do not allow.
    """
    schedule, name = default_schedule(limits), record_name(operator, limits)
    for bucket, record in records.of(name).items():
        try:
            schedule = schedule.with_parameters(bucket, record.parameters)
        except ValueError as error:
            raise CompileError(
                f"tuning records of {records.device} do not fit this version: {name}, {bucket}: "
                f"{error}; delete the file and tune again"
            ) from None
    return schedule
