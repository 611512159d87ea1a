"""Weights on disk: `tensor-cache.json` and `params_shard_*.bin`, as TVM and MLC-LLM define them.

Source: `dump_tensor_cache` in tvm/contrib/tvmjs.py. A shard is the raw little-endian bytes of its
tensors, in C order; the JSON says where each one lies:

    {"metadata": {"ParamSize": tensors, "ParamBytes": bytes, ...},
     "records": [{"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes", "md5sum",
                  "records": [{"name", "shape", "dtype", "format": "raw", "nbytes",
                               "byteOffset"}]}]}

A tensor may be listed in parts (`tensor_parts.py`); here it is one all the same.

A shard has at most 32 MB, or holds one tensor. We start every tensor on a multiple of 64 bytes
(TVM's files need not), so that a mapped one can be used where it lies.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from .dtypes import dtype_name, numpy_dtype
from .errors import ArtifactError
from .files import atomic_write, disk_errors
from .hashing import hash_file, hash_json
from .tensor_format import Shape
from .tensor_parts import in_parts, joined

TENSOR_CACHE_JSON = "tensor-cache.json"
ALIGNMENT = 64
SHARD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a cache. `encoding` is `raw`, or `f32-to-bf16` for a float32 tensor of which
    only the upper 16 bits are stored; `num_bytes` counts what is stored."""

    name: str
    shape: Shape
    dtype: str
    encoding: str
    shard: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardRecord:
    file: str
    num_bytes: int
    md5: str


class TensorCacheWriter:
    """Writes tensors as they come, holding none of them; the JSON is written by `close`.

        with TensorCacheWriter(folder, metadata) as writer:
            writer.add("model.embed_tokens.q_weight", array)

    Leaving the block by an exception writes no JSON: the folder is then no cache.
    """

    def __init__(
        self,
        folder: Path,
        metadata: dict[str, Any] | None = None,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """`metadata` is any JSON object; `ParamSize` and `ParamBytes` are added to it."""
        self._folder = folder
        self._metadata = dict(metadata or {})
        self._shard_bytes = shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._num_tensor_bytes = 0
        self._open: _ShardFile | None = None

    def add(self, name: str, array: np.ndarray) -> None:
        """Append a tensor. ValueError if the name came before or the dtype cannot be stored;
        CapacityError if the disk is full."""
        if name in self._names:
            raise ValueError(f"tensor {name} was already written")
        dtype = dtype_name(array.dtype)
        self._names.add(name)
        self._num_tensor_bytes += array.nbytes
        # reshape(-1) first, because a scalar or an empty array has no byte view.
        flat = np.ascontiguousarray(array, numpy_dtype(dtype).newbyteorder("<")).reshape(-1)
        record = {
            "name": name,
            "shape": list(array.shape),
            "dtype": dtype,
            "format": "raw",
            "nbytes": array.nbytes,
        }
        self._shard_for(array.nbytes).append(record, flat.view(np.uint8).data)

    def close(self) -> None:
        """Finish the last shard and write `tensor-cache.json`."""
        self._close_shard()
        self._metadata |= {"ParamSize": len(self._names), "ParamBytes": self._num_tensor_bytes}
        document = {"metadata": self._metadata, "records": self._shards}
        atomic_write(self._folder / TENSOR_CACHE_JSON, _json(document))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._open is not None:
            self._open.file.close()

    def _shard_for(self, num_bytes: int) -> "_ShardFile":
        """The shard in progress if the tensor fits, else a new one."""
        shard = self._open
        if shard is not None and shard.next_offset + num_bytes > self._shard_bytes:
            self._close_shard()
            shard = None
        if shard is None:
            path = self._folder / f"params_shard_{len(self._shards)}.bin"
            shard = self._open = _ShardFile(path)
        return shard

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None


class _ShardFile:
    """A shard being written, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._records: list[dict[str, Any]] = []
        self._md5 = hashlib.md5(usedforsecurity=False)
        with disk_errors(path):
            self.file: BufferedWriter = path.open("wb")

    @property
    def next_offset(self) -> int:
        return self.num_bytes + -self.num_bytes % ALIGNMENT

    def append(self, record: dict[str, Any], data: memoryview) -> None:
        self._write(bytes(self.next_offset - self.num_bytes))
        self._records.append({**record, "byteOffset": self.num_bytes})
        self._write(data)

    def close(self) -> dict[str, Any]:
        with disk_errors(self.path):
            self.file.close()
        return {
            "dataPath": self.path.name,
            "format": "raw-shard",
            "nbytes": self.num_bytes,
            "records": self._records,
            "md5sum": self._md5.hexdigest(),
        }

    def _write(self, data: bytes | memoryview) -> None:
        with disk_errors(self.path):
            self.file.write(data)
        self._md5.update(data)
        self.num_bytes += len(data)


class TensorCacheReader:
    """The tensors of a cache by name, memory-mapped.

    ArtifactError when opened if the JSON is missing or damaged, or a shard is missing or has the
    wrong size (its bytes are only checked by `verify`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, Any] = {}
        self.shards: dict[str, ShardRecord] = {}
        self.largest_record_bytes = 0
        """Of what the JSON lists, parts of tensors each on their own."""
        self._records: dict[str, TensorRecord] = {}
        self._maps: dict[str, np.ndarray] = {}
        path = folder / TENSOR_CACHE_JSON
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ArtifactError(f"{folder} holds no weights: there is no {path.name}") from None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"cannot read {path}: {error}; build it again") from None
        try:
            self.metadata = dict(document["metadata"])
            for record in document["records"]:
                self._add_shard(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"{path} is damaged ({error!r}); build it again") from None

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, in file order."""
        return tuple(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def info(self, name: str) -> TensorRecord:
        """Where a tensor lies; ArtifactError if there is none of that name."""
        try:
            return self._records[name]
        except KeyError:
            raise ArtifactError(f"{self.folder} holds no tensor {name}; build it again") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor, read-only, starting on a multiple of 64 bytes. It is a view of the mapped
        file, except where the file has it elsewhere or as `f32-to-bf16`: then a copy."""
        record = self.info(name)
        dtype = numpy_dtype(record.dtype)
        if record.num_bytes == 0:
            return np.empty(record.shape, dtype)
        stored = self._map(record.shard)[record.offset : record.offset + record.num_bytes]
        if record.encoding == "f32-to-bf16":
            widened = aligned_empty((len(stored) // 2,), np.dtype(np.uint32))
            np.left_shift(stored.view("<u2"), 16, out=widened, dtype=np.uint32, casting="unsafe")
            stored = widened.view(np.uint8)
        elif record.offset % ALIGNMENT:
            copy = aligned_empty(stored.shape, stored.dtype)
            copy[:] = stored
            stored = copy
        array = stored.view(dtype.newbyteorder("<")).reshape(record.shape)
        array = array.astype(dtype, copy=False)
        array.flags.writeable = False
        return array

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Hash every shard again; ArtifactError naming the first one that does not match.

        `progress(done, total)` is called with bytes."""
        total = sum(shard.num_bytes for shard in self.shards.values())
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        for shard in self.shards.values():
            if hash_file(self.folder / shard.file, "md5", progress=advance) != shard.md5:
                raise ArtifactError(
                    f"shard {self.folder / shard.file} is corrupted: its MD5 is not that of "
                    f"{TENSOR_CACHE_JSON}; build or fetch it again"
                )

    def weights_hash(self) -> str:
        """Changes with any tensor's name, shape, dtype, place or bytes."""
        shards = [[shard.file, shard.num_bytes, shard.md5] for shard in self.shards.values()]
        places = [[r.shard, r.offset, r.encoding] for r in self._records.values()]
        return hash_json([self._signature(), shards, places])

    def layout_hash(self) -> str:
        """Changes with any tensor's name, shape or dtype: what a library is compiled for."""
        return hash_json(sorted(self._signature()))

    def _signature(self) -> list[list[Any]]:
        return [[r.name, list(r.shape), r.dtype] for r in self._records.values()]

    def _map(self, shard: str) -> np.ndarray:
        mapped = self._maps.get(shard)
        if mapped is None:
            # A plain array over the map: memmap's subclass hooks cost time on every view.
            mapped = np.asarray(np.memmap(self.folder / shard, np.uint8, "r"))
            self._maps[shard] = mapped
        return mapped

    def _add_shard(self, record: dict[str, Any]) -> None:
        shard = ShardRecord(str(record["dataPath"]), int(record["nbytes"]), str(record["md5sum"]))
        path = self.folder / shard.file
        if Path(shard.file).name != shard.file:
            raise ValueError(f"shard outside the folder: {shard.file}")
        if record["format"] != "raw-shard":
            raise ValueError(f"shard format {record['format']}")
        if not path.is_file():
            raise ArtifactError(f"shard {path} is missing; build or fetch it again")
        if path.stat().st_size != shard.num_bytes:
            raise ArtifactError(
                f"shard {path} has {path.stat().st_size} bytes instead of {shard.num_bytes}; "
                f"build or fetch it again"
            )
        self.shards[shard.file] = shard
        sizes = [int(entry["nbytes"]) for entry in record["records"]]
        self.largest_record_bytes = max(self.largest_record_bytes, *sizes, 0)
        for entry in joined(record["records"]):
            self._add_tensor(shard, entry)

    def _add_tensor(self, shard: ShardRecord, entry: dict[str, Any]) -> None:
        record = TensorRecord(
            name=str(entry["name"]),
            shape=tuple(int(size) for size in entry["shape"]),
            dtype=str(entry["dtype"]),
            # TVM writes its default encoding beside every dtype; it means something for float32.
            encoding=str(entry["format"]) if entry["dtype"] == "float32" else "raw",
            shard=shard.file,
            offset=int(entry["byteOffset"]),
            num_bytes=int(entry["nbytes"]),
        )
        if record.encoding not in ("raw", "f32-to-bf16"):
            raise ValueError(f"tensor {record.name} is encoded as {record.encoding}")
        item_bytes = 2 if record.encoding == "f32-to-bf16" else numpy_dtype(record.dtype).itemsize
        if min(record.shape, default=0) < 0:
            raise ValueError(f"tensor {record.name} has shape {record.shape}")
        if record.num_bytes != math.prod(record.shape) * item_bytes:
            raise ValueError(f"tensor {record.name} has {record.num_bytes} bytes")
        if record.offset < 0 or record.offset + record.num_bytes > shard.num_bytes:
            raise ValueError(f"tensor {record.name} lies outside {shard.file}")
        if record.name in self._records:
            raise ValueError(f"tensor {record.name} comes twice")
        self._records[record.name] = record


def list_in_parts(folder: Path, parts: Mapping[str, Sequence[int]]) -> None:
    """Let a cache list these tensors in parts of so many rows, and all others whole; no byte of a
    shard changes. ArtifactError if the JSON cannot be read or a tensor has other rows."""
    path = folder / TENSOR_CACHE_JSON
    try:
        document = json.loads(path.read_bytes())
        shards = [
            {**shard, "records": in_parts(shard["records"], parts)} for shard in document["records"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} is damaged ({error!r}); build it again") from None
    if shards != document["records"]:
        atomic_write(path, _json({**document, "records": shards}))


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()


def aligned_empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that starts on a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
