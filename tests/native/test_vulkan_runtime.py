"""The Vulkan runtime: memory, copies, the order of commands, and its messages."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError, CapacityError, EverycastError
from everycast.artifact.tensor_cache import aligned_empty
from everycast.engine.devices import DeviceMemory
from everycast.engine.tvm_runtime import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

EXERCISE = Path(__file__).with_name("vulkan_exercise.py")
THREADS = 64


@pytest.fixture(scope="module")
def memory() -> DeviceMemory:
    try:
        return DeviceMemory("vulkan")
    except EverycastError as error:
        pytest.skip(f"no Vulkan device: {error}")


@pytest.fixture(scope="module")
def library(memory: DeviceMemory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the kernel `add_one(x, y)`: y = x + 1 over 256 int32."""
    import tvm
    from everycast.targets.vulkan.module import register
    from tvm.script import tirx as T

    register()

    @T.prim_func(s_tir=True)
    def add_one(x: T.Buffer((256,), "int32"), y: T.Buffer((256,), "int32")):
        T.func_attr({"global_symbol": "add_one", "tirx.noalias": True})
        for block in T.thread_binding(256 // 64, "blockIdx.x"):
            for thread in T.thread_binding(64, "threadIdx.x"):
                with T.sblock("element"):
                    T.reads(x[block * 64 + thread])
                    T.writes(y[block * 64 + thread])
                    y[block * 64 + thread] = x[block * 64 + thread] + 1

    path = tmp_path_factory.mktemp("vulkan") / "add_one.so"
    target = tvm.target.Target({"kind": "vulkan", "host": {"kind": "llvm"}})
    module = tvm.IRModule({"add_one": add_one})
    tvm.compile(module, target=target).export_library(str(path))
    return path


@pytest.fixture(scope="module")
def add_one(library: Path) -> Callable[[Any, Any], None]:
    function: Callable[[Any, Any], None] = tvm_ffi.load_module(str(library))["add_one"]
    return function


def counters() -> dict[str, int]:
    values = tvm_ffi.get_global_func("everycast.vulkan.counters")(0)
    return {str(name): int(value) for name, value in dict(values).items()}


def download(memory: DeviceMemory, tensor: Any, dtype: str = "int32") -> np.ndarray:
    array = aligned_empty(tuple(map(int, tensor.shape)), np.dtype(dtype))
    memory.download(tensor, array)
    return array


SETTINGS = [
    {},
    {"EVERYCAST_VULKAN_UNIFIED": "0"},
    {"EVERYCAST_VULKAN_PUSH_DESCRIPTORS": "0"},
    {"EVERYCAST_VULKAN_UNIFIED": "0", "EVERYCAST_VULKAN_PUSH_DESCRIPTORS": "0",
     "EVERYCAST_VULKAN_VALIDATION": "1"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(k[17:] for k in s) or "none")
def test_copies_and_dependent_kernels(
    library: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    """With memory that the host shares and that it does not, with push descriptors and descriptor
    sets; under the validation layer where it is installed."""
    run = exercise(library, settings)
    if "vulkan-validationlayers" in run.stderr:
        pytest.skip("the Vulkan validation layer is not installed")
    assert run.returncode == 0, run.stderr
    assert "validation" not in run.stderr.lower()
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["dispatches"] == 3050 and counts["submissions"] < 300


def exercise(library: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXERCISE), str(library)],
        env={**os.environ, **settings}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_tensors_are_as_small_as_the_validation_layer_wants() -> None:
    """Mesa's CPU driver takes larger ones than it says."""
    ask = (
        "import tvm_ffi; from everycast.engine.devices import DeviceMemory; "
        "memory = DeviceMemory('vulkan'); get = tvm_ffi.get_global_func; "
        "limit = get('device_api.vulkan.get_target_property'); "
        "print(memory.max_tensor_bytes() <= limit(memory._device, 'max_storage_buffer_range'))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", ask], env={**os.environ, "EVERYCAST_VULKAN_VALIDATION": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "vulkan-validationlayers" in run.stderr:
        pytest.skip("the Vulkan validation layer is not installed")
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


def test_pipelines_are_kept_for_the_next_process(library: Path, tmp_path: Path) -> None:
    """In the user's cache, to which the compiled runtime is linked here to save the time."""
    from everycast.artifact.cache import cache_dir

    (tmp_path / "native").symlink_to(cache_dir() / "native")
    for _ in range(2):
        run = exercise(library, {"EVERYCAST_CACHE": str(tmp_path)})
        assert run.returncode == 0, run.stderr
        (kept,) = (tmp_path / "vulkan").iterdir()
        assert kept.suffix == ".bin" and kept.stat().st_size > 0
        kept.write_bytes(b"damaged")


def test_submissions_are_few(memory: DeviceMemory, add_one: Any) -> None:
    """One soon after a wait, so that the device starts; one when the host reads."""
    x, y = (memory.upload(np.zeros(256, np.int32), "int32") for _ in range(2))
    for length, submissions in ((1, 1), (31, 1), (32, 1), (33, 2), (500, 2), (3000, 4)):
        download(memory, y)
        before = counters()
        for _ in range(length):
            add_one(x, y)
        download(memory, y)
        after = counters()
        assert after["dispatches"] - before["dispatches"] == length
        assert after["submissions"] - before["submissions"] == submissions


def test_only_dependent_kernels_wait_for_each_other(memory: DeviceMemory, add_one: Any) -> None:
    tensors = [memory.upload(np.full(256, i, np.int32), "int32") for i in range(8)]
    download(memory, tensors[0])

    def barriers(pairs: list[tuple[int, int]]) -> int:
        memory.copy(tensors[6], tensors[7])
        download(memory, tensors[7])
        add_one(tensors[6], tensors[7])  # after which nothing is pending but this
        before = counters()["barriers"]
        for source, target in pairs:
            add_one(tensors[source], tensors[target])
        count = counters()["barriers"] - before
        download(memory, tensors[7])
        return count

    assert barriers([(0, 1), (0, 2), (0, 3)]) == 0  # all read one
    assert barriers([(0, 1), (1, 2), (2, 3)]) == 2  # each reads what the last wrote
    assert barriers([(0, 1), (2, 0)]) == 1  # writes what the last read
    assert barriers([(0, 1), (2, 1)]) == 1  # both write one


def test_memory_is_given_back(memory: DeviceMemory, add_one: Any) -> None:
    def turn(i: int) -> None:
        sizes = [256, 1000 + 37 * i, 3_000_000 + i, 70_000_000]
        tensors = [memory.empty((size,), "int8") for size in sizes]
        x, y = (memory.upload(np.full(256, i, np.int32), "int32") for _ in range(2))
        add_one(x, y)
        assert tensors and (i % 50 or (download(memory, y) == i + 1).all())

    turn(0)
    before = counters()
    for i in range(500):
        turn(i)
    after = counters()
    assert after["bytes_used"] == before["bytes_used"]
    assert after["bytes_allocated"] <= before["bytes_allocated"] + 140_000_000
    memory.synchronize()
    turn(0)
    assert counters()["bytes_allocated"] <= before["bytes_allocated"] + 140_000_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2_000_000), st.booleans()), max_size=30))
def test_tensors_do_not_overlap(memory: DeviceMemory, plan: list[tuple[int, bool]]) -> None:
    """Each is filled with its own number; those that are left hold it to the end."""
    kept: dict[int, Any] = {}
    for number, (size, is_freed) in enumerate(plan):
        kept[number] = memory.upload(np.full(size, number % 251, np.uint8), "uint8")
        if is_freed and kept:
            kept.pop(next(iter(kept)))
    for number, tensor in kept.items():
        assert (download(memory, tensor, "uint8") == number % 251).all()


def test_too_large_a_tensor_is_refused_with_both_numbers(memory: DeviceMemory) -> None:
    before = counters()
    with pytest.raises(CapacityError) as caught:
        memory.empty((memory.total_bytes() * 2,), "uint8")
    text = str(caught.value)
    assert "no memory for" in text and " MB are free" in text and "\n" not in text
    assert counters() == before


def test_memory_that_ran_out_can_be_used_again(memory: DeviceMemory, add_one: Any) -> None:
    x, y = (memory.upload(np.full(256, 5, np.int32), "int32") for _ in "xy")
    tensors = []
    with pytest.raises(CapacityError, match=r"no memory for 2[0-9]+ MB"):
        for _ in range(4096):
            tensors.append(memory.empty((250_000_000,), "uint8"))
    assert tensors
    count = len(tensors)
    add_one(x, y)  # pending while the others are freed
    tensors.clear()
    tensors = [memory.empty((250_000_000,), "uint8") for _ in range(count)]
    assert (download(memory, y) == 6).all()


def test_what_is_known_of_a_device(memory: DeviceMemory) -> None:
    names = list(tvm_ffi.get_global_func("everycast.vulkan.device_names")())
    assert names and str(names[0]).endswith(("(discrete)", "(integrated)", "(virtual)", "(cpu)"))
    ask = tvm_ffi.get_global_func("device_api.vulkan.get_target_property")
    device = tvm_ffi.device("vulkan", 0)
    assert str(names[0]).startswith(str(ask(device, "device_name")))
    assert int(ask(device, "max_threads_per_block")) >= 128  # Vulkan's promise
    assert ask(device, "no such property") is None
    assert memory.free_bytes() <= memory.total_bytes()
    limit = memory.max_tensor_bytes()
    assert limit is not None and limit >= 1 << 27


def test_two_threads_share_a_device(memory: DeviceMemory, add_one: Any) -> None:
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(20):
                x, y = (memory.upload(np.full(256, start + turn, np.int32), "int32") for _ in "xy")
                for _ in range(25):
                    add_one(x, y)
                    add_one(y, x)
                assert (download(memory, x) == start + turn + 50).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_parts_of_tensors_are_arguments(memory: DeviceMemory, add_one: Any) -> None:
    both = memory.upload(np.arange(1024, dtype=np.int32), "int32")
    x = memory.argument(both, (256,), "int32", 1024)
    y = memory.argument(both, (256,), "int32", 2048)
    add_one(x, y)
    got = download(memory, both)
    assert (got[512:768] == np.arange(256, 512) + 1).all()
    assert (got[:512] == np.arange(512)).all() and (got[768:] == np.arange(768, 1024)).all()


def test_a_tensor_of_another_device_is_refused(memory: DeviceMemory, library: Path) -> None:
    kernel = tvm_ffi.load_module(str(library)).imports[0]["add_one_kernel"]
    with pytest.raises(RuntimeError, match="is not, or no longer, on the Vulkan device"):
        kernel(None, None, 4, 64)
    with pytest.raises(TypeError, match="'add_one_kernel' takes 4 arguments, got 1"):
        kernel(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"EVERYCAST_VULKAN_DEVICE": "no such device"}, "but the devices are: 0 ("),
        ({"VK_ICD_FILENAMES": "/nowhere.json"}, "mesa-vulkan-drivers"),
    ],
)
def test_what_is_missing_is_said(library: Path, settings: dict[str, str], message: str) -> None:
    script = "from everycast.engine.devices import DeviceMemory; DeviceMemory('vulkan')"
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **settings}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"{ArtifactError.__module__}.ArtifactError: cannot run on vulkan: ")
    assert message in last
