"""Devices by the names that tuning records have: one for all that are alike.

vulkan-llvmpipe-llvm-15-0-6-256-bits-1a2b3c4d     kind, what it calls itself, and a hash of
                                                  those, of its driver and of its features
"""

import hashlib
import logging
import re
from collections.abc import Sequence

from .artifact import tuning
from .artifact.errors import ArtifactError, RequestError
from .artifact.tuning import TunedDevice
from .engine.device_runtimes import KINDS
from .engine.devices import DeviceInfo, DeviceMemory, list_devices, split_device

logger = logging.getLogger(__name__)


def record_name(info: DeviceInfo) -> str:
    """What records of the device are kept under."""
    known = [info.kind, info.name, info.driver, *info.features]
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]
    words = re.findall(r"[a-z0-9]+", f"{info.kind} {info.name}".lower())
    return "-".join([*words, digest])


def device_to_tune(target: str, device: str | None) -> TunedDevice | None:
    """The device to measure kernels for `target` (`vulkan`, `cuda:sm_90`) on: `device`
    (`vulkan:1`), or the first of its kind. None for the CPU and targets that nothing runs here.

    Raises ArtifactError if there is no such device, RequestError if it is of another kind.
    """
    kind = target.partition(":")[0]
    if device is not None and split_device(device)[0] != kind:
        raise RequestError(f"kernels for {target} do not run on {device}; leave --device out")
    if kind not in KINDS:
        return None
    devices = list_devices(kind)
    _, index = split_device(device or kind)
    if index >= len(devices):
        raise ArtifactError(
            f"there is no device {kind}:{index}; this machine has {kind}:0"
            + (f" to {kind}:{len(devices) - 1}" if len(devices) > 1 else "")
        )
    return _tuned(devices[index])


def devices_with_records(target: str, device: str | None) -> dict[str, str]:
    """Whose records libraries are compiled with: kind → name of the device in records.

    With `device`: that one, of this machine (`vulkan:1`) or by the name that a device has in its
    records. Without, for each kind that `target` (or `all`) stands for, the first device here that
    there are records of. Devices are opened only where there are records.

    Raises ArtifactError if `device` is not here, RequestError if `target` does not run on it.
    """
    name = target.partition(":")[0]
    kinds = [kind for kind in KINDS if target == "all" or kind == name]
    known = {kind: [n for n in _recorded() if n.startswith(f"{kind}-")] for kind in kinds}
    if device is None:
        firsts = {kind: _first_here(kind, names) for kind, names in known.items() if names}
        return {kind: first for kind, first in firsts.items() if first is not None}
    for kind, names in known.items():
        if device in names:
            return {kind: device}
    kind, _ = split_device(device)
    if kind not in kinds:
        raise RequestError(f"a library for {target} does not run on {device}; leave --device out")
    chosen = device_to_tune(kind, device)
    assert chosen is not None
    return {kind: chosen.name}


def _tuned(info: DeviceInfo) -> TunedDevice:
    architecture = DeviceMemory(f"{info.kind}:{info.index}").architecture()
    return TunedDevice(info.kind, info.index, architecture, info.label, record_name(info))


def _recorded() -> Sequence[str]:
    """Names of devices that there are records of."""
    folders = (tuning.SHIPPED, tuning.user_folder())
    return sorted({path.stem for folder in folders for path in folder.glob("*.json")})


def _first_here(kind: str, known: Sequence[str]) -> str | None:
    try:
        here = [_tuned(info) for info in list_devices(kind)]
    except ArtifactError:
        return None  # records of devices that are elsewhere
    named = [device for device in here if device.name in known]
    if len({device.name for device in named}) > 1:
        others = ", ".join(device.label for device in named[1:])
        logger.warning(
            "compiled with what tuning found for %s; --device takes another: %s",
            named[0].label, others,
        )  # fmt: skip
    return named[0].name if named else None
