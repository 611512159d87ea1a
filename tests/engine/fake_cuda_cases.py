"""Runs cases on the fake CUDA of fake_cuda.c, in a process of its own: `fake_cuda_cases.py JSON`.

The JSON lists cases: {"environment": {name: value}, "model": folder, "device": text}. Prints one
line of JSON for each: what came of it.
"""

import json
import os
import sys
from typing import Any

from everycast.artifact.errors import EverycastError
from everycast.engine.devices import DeviceMemory, list_devices
from everycast.engine.loader import open_model
from everycast.engine.mlc_engine import MLCEngine


def run(case: dict[str, Any]) -> dict[str, Any]:
    if case["device"] == "list":
        return {"devices": [[d.label, d.driver, d.features] for d in list_devices("cuda")]}
    if case["device"] == "fill":
        memory = DeviceMemory("cuda")
        memory.empty((memory.total_bytes() * 2,), "uint8")
    opened = open_model(case["model"], case["device"])
    memory = opened.memory
    before = 0 if memory is None else memory.free_bytes()
    with MLCEngine.from_parts(*opened.load()) as engine:
        answer = engine.completions.create(prompt=[5, 6, 7], max_tokens=8, ignore_eos=True)
        taken = 0 if memory is None else before - memory.free_bytes()
    assert answer.usage is not None
    return {
        "choice": opened.choice,
        "tokens": answer.usage.completion_tokens,
        "taken": taken,
        "architectures": opened.library.metadata.get("architectures"),
    }


for case in json.loads(sys.argv[1]):
    os.environ.update(case["environment"])
    try:
        outcome = run(case)
    except EverycastError as error:
        outcome = {"error": str(error)}
    print(json.dumps(outcome), flush=True)
    for name in case["environment"]:
        del os.environ[name]
