"""Other programs that want the CPUs: what a laptop in use, or a shared server, is like."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_cpus() -> Iterator[None]:
    """One process for each CPU that this one may use, which computes without end."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    command = [sys.executable, "-S", "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count or 1):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield
