"""The record by which an app built on WebLLM knows a model (`appConfig.model_list`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .manifest import LibraryStamp, Manifest, read_manifest

WEB_TARGET = "webgpu"
BASE_URL = "https://huggingface.co/<user>/{model}"
"""Where people put models; any host does that serves <base>/resolve/main/<file>."""
CONTEXT_WINDOW_SIZE = 4096
"""Most that a record asks for: memory for all of it is taken when the model loads."""


def model_record(
    manifest: Manifest, target: str, context_window_size: int, model_id: str
) -> dict[str, Any]:
    """WebLLM's `ModelRecord` of the library for `target`."""
    stamp: LibraryStamp = manifest.libraries[target]
    base = BASE_URL.format(model=model_id)
    most = stamp.target_spec.get("max_context_window_size", CONTEXT_WINDOW_SIZE)
    context = min(context_window_size, CONTEXT_WINDOW_SIZE, most)
    page_size = stamp.limits.page_size
    kv_bytes = -(-context // page_size) * stamp.limits.page_bytes
    workspace = max(stamp.function_memory_bytes.values(), default=0)
    variant = target.partition(":")[2]
    return {
        "model": base,
        "model_id": f"{model_id}-{variant}" if variant else model_id,
        "model_lib": f"{base}/resolve/main/{stamp.file}",
        "vram_required_MB": round((manifest.weights.num_bytes + kv_bytes + workspace) / 1e6),
        "required_features": list(stamp.target_spec.get("required_features", ())),
        "overrides": {"context_window_size": context},
    }


def webllm_advice(folder: Path, targets: Sequence[str]) -> list[str]:
    """Lines that tell how an app built on WebLLM gets the model; none without such a library."""
    manifest = read_manifest(folder)
    chosen = [name for name in targets if name.partition(":")[0] == WEB_TARGET]
    if not chosen:
        return []
    config = json.loads((folder / "mlc-chat-config.json").read_bytes())
    context = int(config["context_window_size"])
    records = [model_record(manifest, name, context, folder.name) for name in chosen]
    lines = [
        "for an app built on WebLLM: upload the folder, and add one of these to its model_list "
        "(f16 where the device has shader-f16, f16-subgroups where its adapter.info also has a "
        "subgroupMinSize of 32 or more, cpu-adapter where it is a CPU):",
        *(json.dumps(record) for record in records),
    ]
    if not config["conv_template"].get("is_exact", True):
        lines.append("WebLLM cannot write this model's chat template exactly: answers may differ")
    return lines
