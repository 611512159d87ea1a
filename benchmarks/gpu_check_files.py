"""What `gpu_check` prepares where there is a compiler, and reads where there is a GPU.

<folder>/check.json                  kind, shapes, cases
<folder>/limits.so                   two kernels that measure what the device can do
<folder>/cases/<name>/model.so       a tiny model's library, its weights (a tensor cache), and
                      expected.npz   its logits on a CPU, step by step
<folder>/shapes/<name>/model.so      the library of a real model's shape; weights are made up
                       rope.npz      its rotary frequencies
"""

from dataclasses import dataclass

import numpy as np

from ..engine.model_runner import StepInput

CHECK_JSON, LIMITS_LIBRARY, MODEL_LIBRARY = "check.json", "limits.so", "model.so"
EXPECTED, ROPES = "expected.npz", "rope.npz"

NUM_PAGES = 64
SEQUENCES = {"a": 0, "b": 24, "c": 28, "d": 32}
"""First page of each sequence in the pages of a tiny model."""
BLOCKS = 24
"""Width of the block tables: the longest sequence has so many pages."""

VOCAB_SIZE = 320
Chunk = tuple[str, int, int]
"""A sequence, its tokens before this step, and its tokens in it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step checks: `chunks` of several sequences go through the model together."""

    what: str
    chunks: tuple[Chunk, ...]


STEPS = (
    Step("prefill: many rows", (("a", 0, 130),)),
    Step("prefill: a second chunk", (("a", 130, 150),)),
    Step("prefill and decode together", (("a", 280, 1), ("b", 0, 33), ("c", 0, 1))),
    Step("decode: one row, a long context", (("a", 281, 1),)),
    Step("decode: few rows", (("a", 282, 1), ("b", 33, 1), ("c", 1, 1))),
    Step("several tokens of a sequence", (("a", 283, 4), ("b", 34, 2))),
)
"""Rows choose the kernels of linear layers, contexts those of attention."""


def step_input(step: Step) -> StepInput:
    """The step with the token ids that a sequence always has; logits of all tokens."""
    ids = {
        name: np.random.default_rng(i).integers(3, VOCAB_SIZE, 400, dtype=np.int32)
        for i, name in enumerate(SEQUENCES)
    }
    parts = [ids[name][before : before + count] for name, before, count in step.chunks]
    positions = [np.arange(before, before + count) for _, before, count in step.chunks]
    offsets = np.cumsum([0, *(count for *_, count in step.chunks)]).astype(np.int32)
    # A page that a sequence does not have is never looked at; it must be one all the same.
    tables = [
        np.minimum(SEQUENCES[name] + np.arange(BLOCKS), NUM_PAGES - 1) for name, *_ in step.chunks
    ]
    return StepInput(
        np.concatenate(parts),
        np.concatenate(positions).astype(np.int32),
        offsets,
        np.stack(tables).astype(np.int32),
        np.arange(offsets[-1], dtype=np.int32),
    )
