"""Every kernel of every model type: valid WGSL, within the limits of WebLLM's device."""

import json
import subprocess
from pathlib import Path
from typing import Any

from everycast.targets.inspection import webgpu


def test_kernels_are_valid_and_within_limits(model: Path, web: Any) -> None:
    """The newest @mlc-ai/web-runtime opens each library; Dawn's null backend compiles it."""
    names = (web.library, web.gpu_library, web.f16_library, web.subgroup_library)
    libraries = [model / name for name in names]
    run = subprocess.run(
        ["node", str(web.folder / "tests" / "open_libraries.mjs"), *map(str, libraries)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    opened = json.loads(run.stdout)
    for library in libraries:
        shaders = webgpu.read_shaders(library.read_bytes())
        assert opened[str(library)]["shaders"] == shaders and len(shaders) > 10
        finding = webgpu.inspect(library)
        assert finding.faults == () and "valid for Dawn" in finding.facts
        assert library.stat().st_size < 5_000_000
