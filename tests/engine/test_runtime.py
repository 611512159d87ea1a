import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError, CapacityError
from everycast.artifact.manifest import read_manifest
from everycast.engine import runtime
from everycast.engine.runtime import Library, as_array, as_tensor, huge_array

HUGE = 2 << 20


@pytest.mark.parametrize("num_bytes", [1, 64, HUGE - 1, HUGE, 3 * HUGE + 5])
def test_huge_arrays_are_aligned_zeroed_and_writable(num_bytes: int) -> None:
    array = huge_array(num_bytes)
    assert (array.shape, array.dtype) == ((num_bytes,), np.uint8)
    assert array.ctypes.data % HUGE == 0 and not array.any()
    array[:] = 7
    assert (array == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_huge_arrays_are_private_memory() -> None:
    """Shared anonymous memory gets no transparent huge pages."""
    array = huge_array(HUGE)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= array.ctypes.data < end:
            assert permissions == "rw-p"
            return
    pytest.fail("the array is in no mapping")


def test_memory_that_is_not_to_be_had() -> None:
    with pytest.raises(CapacityError, match="the system grants no 4611686018427 MB"):
        huge_array(1 << 62)


def test_tensors_share_memory_and_keep_it_alive() -> None:
    array = huge_array(64).view(np.float32)
    array[3] = 1.5
    tensor = as_tensor(array)
    array[4] = 2.5
    del array
    gc.collect()
    assert as_array(tensor)[:5].tolist() == [0, 0, 0, 1.5, 2.5]


def test_a_library(tiny_artifact: Path) -> None:
    stamp = read_manifest(tiny_artifact).libraries["cpu"]
    library = Library(tiny_artifact / stamp.file)
    assert library.metadata["vocab_size"] == 320
    assert library.metadata["prefill_chunk_size"] == stamp.limits.prefill_chunk_size
    for name in ("forward", "logits"):
        assert callable(library.function(name))


@pytest.mark.parametrize(
    "content", [None, b"", b"no library\n" * 100, b"\x7fELF" + bytes(2000)], ids=repr
)
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "模型 a'b.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        Library(path)
    message = str(caught.value)
    assert message.startswith(f"{path} does not load as a model library: ") and "\n" not in message
    assert message.endswith("; compile it again")


def test_another_shared_library(tmp_path: Path) -> None:
    """It loads, but holds no model."""
    import tvm_ffi

    other = next((Path(tvm_ffi.__file__).parent / "lib").glob("libtvm_ffi.*"))
    with pytest.raises(ArtifactError, match="does not load as a model library"):
        Library(other)


def test_a_missing_runtime_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = runtime.load_runtime.__wrapped__
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="pip install apache-tvm"):
        load()

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(ArtifactError, match=r"does not load: .*install apache-tvm again"):
        load()
