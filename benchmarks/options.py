"""What was typed after `everycast bench`, checked before anything is done."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.devices import AUTO, CPU, split_device
from .peers import Isa, Peer, find_peer, package_names
from .shapes import find_shape
from .workers import BenchError
from .works import Work, parse_works


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What was typed, checked."""

    model: str | None
    shape: str | None
    peers: tuple[Peer, ...]
    threads: tuple[int, ...]
    works: tuple[Work, ...]
    rounds: int
    activations: tuple[str, ...]
    isa: Isa
    peer_pythons: Mapping[str, Path] = field(default_factory=dict)
    json: Path | None = None
    plot: Path | None = None
    device: str = CPU
    """Where ours runs: `auto`, or by name (`cuda:1`)."""


def parse_options(
    model: str | None,
    *,
    shape: str | None,
    against: str | None,
    threads: str,
    works: str,
    rounds: int,
    activations: str,
    peer_isa: Isa,
    peer_python: Sequence[str],
    json: Path | None,
    plot: Path | None,
    device: str = CPU,
) -> BenchOptions:
    """Raises BenchError for what makes no sense, before anything is done."""
    if (model is None) == (shape is None):
        raise BenchError("give a MODEL or --shape, one of the two")
    if shape is not None:
        find_shape(shape)
    try:
        parsed_works = parse_works(_names(works, "--works"))
    except ValueError as error:
        raise BenchError(str(error)) from None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counts = []
    for text in _names(threads, "--threads"):
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= (cores or 1):
            raise BenchError(
                f"--threads {threads}: {text!r} is no number from 1 to {cores}, the cores of this "
                "machine"
            )
        counts.append(int(text))
    modes = _names(activations, "--activations")
    known = ("auto", "int8", "mixed", "int16", "float32")
    if bad := [mode for mode in modes if mode not in known]:
        raise BenchError(f"--activations {bad[0]!r} is unknown; choose of {', '.join(known)}")
    if device != AUTO:
        split_device(device)
    if against and device.partition(":")[0] != CPU:
        raise BenchError("peers run on the CPU; leave --against out, or take --device cpu")
    peers = dict.fromkeys(_names(against, "--against") if against else ())
    return BenchOptions(
        model=model,
        shape=shape,
        peers=tuple(find_peer(name) for name in peers),
        threads=tuple(dict.fromkeys(counts)),
        works=parsed_works,
        rounds=rounds,
        activations=tuple(dict.fromkeys(modes)),
        isa=peer_isa,
        peer_pythons=dict(_peer_python(text) for text in peer_python),
        json=json,
        plot=plot,
        device=device,
    )


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BenchError(f"{option} is empty; give names by commas")
    return names


def _peer_python(text: str) -> tuple[str, Path]:
    name, is_pair, path = text.partition("=")
    python = Path(path).expanduser()
    if not is_pair or not python.is_file():
        raise BenchError(f"--peer-python {text}: give NAME=PATH, PATH being a Python that is there")
    if name not in (known := package_names()):
        raise BenchError(f"there is no peer environment {name!r}; known: {', '.join(known)}")
    return name, python
