"""The record of a run: written after each set of rounds, so that an interruption loses little."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..artifact.files import atomic_write
from ..artifact.host import running_versions
from .limits import Machine
from .machine import cpu_name, memory_bytes
from .rows import Row, median_machine
from .samples import Samples


class Results:
    """Rows so far, and the samples they come from."""

    def __init__(self, path: Path | None) -> None:
        """path: the file of `--json`, None writes nothing."""
        self.rows: list[Row] = []
        self.machines: dict[int, Machine] = {}
        """What the machine did at best, by number of threads."""
        self._path = path
        self._samples: dict[str, Any] = {}
        self._machine: dict[str, Any] = {
            "cpu": cpu_name(),
            "memory_bytes": memory_bytes(),
            "system": f"{platform.system()} {platform.release()}",
            "versions": asdict(running_versions()),
            "load_average_at_start": round(os.getloadavg()[0], 2),
            "engines": {},
        }

    def add(self, key: str, threads: int, rows: Sequence[Row], samples: Samples) -> None:
        """Keep them under `key`, and write the file."""
        self.rows += rows
        if samples.limits.get("multiply"):
            self.machines[threads] = median_machine(samples)
        self._samples[key] = {
            "figures": samples.figures,
            "details": samples.details,
            "limits": samples.limits,
        }
        for engine, ready in samples.ready.items():
            self._machine["engines"][engine] = ready
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, (json.dumps(self.record(), indent=1) + "\n").encode())

    def record(self) -> dict[str, Any]:
        """What `--json` holds."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "machine": {
                **self._machine,
                "limits": {threads: asdict(limit) for threads, limit in self.machines.items()},
            },
            "samples": self._samples,
        }
