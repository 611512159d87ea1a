"""Every kernel of every model type: valid WGSL, within the limits of WebLLM's device."""

import json
import subprocess
from pathlib import Path
from typing import Any


def test_kernels_are_valid_and_within_limits(model: Path, web: Any) -> None:
    """The newest @mlc-ai/web-runtime opens each library; Dawn's null backend compiles it."""
    libraries = [
        str(model / library) for library in (web.library, web.gpu_library, web.f16_library)
    ]
    run = subprocess.run(
        ["node", str(web.folder / "tests" / "check_shaders.mjs"), *libraries],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout)
    for library in libraries:
        result = results[library]
        assert result["faults"] == []
        assert result["num_kernels"] > 10
        assert Path(library).stat().st_size < 5_000_000
