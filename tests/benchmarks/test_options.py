"""What may be typed after `everycast bench`, and what is said about the rest."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.errors import EverycastError
from everycast.benchmarks.options import BenchOptions, parse_options
from everycast.benchmarks.workers import BenchError

GOOD: dict[str, Any] = {
    "model": "m",
    "shape": None,
    "against": "llama.cpp,openvino,llama.cpp",
    "threads": "1",
    "works": "decode,batch_8,decode",
    "rounds": 7,
    "activations": "auto,int8",
    "peer_isa": "native",
    "peer_python": [f"llama.cpp={sys.executable}"],
    "json": Path("o.json"),
    "plot": None,
}


def parse(**changes: Any) -> BenchOptions:
    return parse_options(**{**GOOD, **changes})


def test_good_options() -> None:
    options = parse()
    assert [peer.name for peer in options.peers] == ["llama.cpp", "openvino"]
    assert [work.name for work in options.works] == ["decode", "batch_8"]
    assert options.threads == (1,) and options.activations == ("auto", "int8")
    assert options.peer_pythons == {"llama.cpp": Path(sys.executable)}
    assert parse(against=None).peers == ()
    assert parse().device == "cpu" and parse(device="cuda:1", against=None).device == "cuda:1"
    cores = len(os.sched_getaffinity(0))
    assert parse(threads=f"1, {cores}").threads[-1] == cores


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "give a MODEL or --shape"),
        ({"shape": "llama-3.2-1b"}, "give a MODEL or --shape"),
        ({"model": None, "shape": "llama-3"}, "no shape 'llama-3'; did you mean"),
        ({"against": "lama.cpp"}, r"no peer 'lama.cpp'; did you mean llama\.cpp"),
        ({"threads": "0"}, "--threads 0: '0' is no number from 1 to"),
        ({"threads": "1,x"}, "--threads 1,x: 'x' is no number from 1 to"),
        ({"threads": "9999"}, "'9999' is no number from 1 to"),
        ({"threads": "²"}, "is no number from 1 to"),
        ({"threads": ","}, "--threads is empty"),
        ({"works": "decode,chat"}, "there is no work 'chat'; choose of"),
        ({"works": ""}, "--works is empty"),
        ({"device": "vulkan"}, "peers run on the CPU; leave --against out"),
        ({"device": "auto"}, "peers run on the CPU; leave --against out"),
        ({"activations": "int4"}, "--activations 'int4' is unknown; choose of"),
        ({"peer_python": ["llama.cpp"]}, "give NAME=PATH"),
        ({"peer_python": ["llama.cpp=/nowhere/python"]}, "give NAME=PATH"),
        ({"peer_python": [f"llama={sys.executable}"]}, "no peer environment 'llama'; known: "),
    ],
)  # fmt: skip
def test_bad_options(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BenchError, match=reason) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_device() -> None:
    with pytest.raises(EverycastError, match=r"device .cdua. cannot be run on .*mean cuda"):
        parse(device="cdua", against=None)
