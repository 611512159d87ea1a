"""How many threads a model runs on: what the user says, else what is fastest here.

TVM would take half of the logical CPUs and pin each thread to one of them, whatever else runs there
and whether a core has two hardware threads or one. Here every CPU that this process may use can
work, pinned to none; where it is not clear how many are best (cores with two hardware threads; more
cores than memory can feed), a few decoding steps decide, once for each library and machine.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ..artifact.cache import cache_dir
from .tvm_runtime import tvm_ffi

_SETTING = "TVM_NUM_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MANY_CORES = 4
"""Up to so many, memory can feed them all."""
_ROUNDS, _SECONDS = 5, 0.3
"""Steps that a number of threads is tried for, unless they take longer."""


def prepare_pools() -> None:
    """Let the thread pools that TVM makes from now on use every CPU of this process. What the
    user set in the environment stays."""
    os.environ.setdefault(_SETTING, str(usable_cpus()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def usable_cpus() -> int:
    """Logical CPUs that this process may run on, by affinity and by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = count or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        limit = min(limit, max(1, int(quota) // int(period)))  # "max" is no number
    return limit


def candidates(num_cpus: int, num_cores: int) -> list[int]:
    """Numbers of threads worth trying, smallest first."""
    cores = min(num_cpus, num_cores)
    few = [cores // 2] if cores > _MANY_CORES else []
    return sorted({*few, cores, num_cpus})


def physical_cores() -> int:
    """Cores behind the usable logical CPUs; as many as those where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return usable_cpus()
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        path = _TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            siblings.add(path.read_text(encoding="ascii"))
        except OSError:
            return usable_cpus()
    return len(siblings)


def choose_threads(step: Callable[[], object], key: str) -> int:
    """Set the calling thread's pool to the number with which `step` is fastest, and return it.

    `key` names the library; the choice is kept in the user's cache. A number that the environment
    gives is not questioned.
    """
    pool = int(os.environ[_SETTING])
    numbers = candidates(min(pool, usable_cpus()), physical_cores())
    if pool != usable_cpus() or len(numbers) == 1:
        return set_threads(pool)
    path = cache_dir() / "threads.json"
    known = _read(path)
    place = f"{key} {numbers}"
    if known.get(place) not in numbers:
        known[place] = _fastest(step, numbers)
        with suppress(OSError):  # a choice that is not kept is made again
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(known), encoding="utf-8")
            temporary.replace(path)
    return set_threads(known[place])


def set_threads(count: int) -> int:
    """Let the calling thread's pool work with `count` threads, at most those it has; how many."""
    any_core = 1
    tvm_ffi.get_global_func("runtime.config_threadpool")(any_core, count)
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


def _fastest(step: Callable[[], object], numbers: Sequence[int]) -> int:
    times = {}
    for count in numbers:
        set_threads(count)
        step()
        rounds: list[float] = []
        start = time.perf_counter()
        while len(rounds) < _ROUNDS and time.perf_counter() - start < _SECONDS:
            before = time.perf_counter()
            step()
            rounds.append(time.perf_counter() - before)
        times[count] = min(rounds)
    return min(times, key=lambda count: times[count])


def _read(path: Path) -> dict[str, int]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
