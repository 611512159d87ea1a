"""A step plan as the small integer tensors that a model runner takes."""

from array import array

import numpy as np

from .model_runner import StepInput
from .scheduler import StepPlan


def build_step_input(plan: StepPlan, arg_max_ids: int = 0) -> StepInput:
    """The plan's tokens. Rows of logits: per chunk its prompt rows, then the sampled row."""
    # Lists first: single numbers go into them quicker than into arrays.
    input_ids: list[int] = []
    positions: list[int] = []
    query_offsets = [0]
    logit_rows: list[int] = []
    offset = 0
    for sequence, first, num_tokens, prompt_rows, is_sampled, _ in plan.chunks:
        if num_tokens == 1:
            input_ids.append(sequence.token_ids[first])
            positions.append(first)
        else:
            input_ids += sequence.token_ids[first : first + num_tokens]
            positions += range(first, first + num_tokens)
        if prompt_rows:
            logit_rows += [offset + position - first for position in prompt_rows]
        offset += num_tokens
        query_offsets.append(offset)
        if is_sampled:
            logit_rows.append(offset - 1)
    return StepInput(
        np.array(input_ids, np.int32),
        np.array(positions, np.int32),
        np.array(query_offsets, np.int32),
        _padded([chunk.sequence.block_table for chunk in plan.chunks]),
        np.array(logit_rows, np.int32),
        arg_max_ids,
    )


def _padded(tables: list["array[int]"]) -> np.ndarray:
    """[len(tables), length of the longest] int32, filled up with 0."""
    num_bytes = max(map(len, tables)) * tables[0].itemsize
    rows = b"".join([table.tobytes().ljust(num_bytes, b"\0") for table in tables])
    return np.frombuffer(rows, np.int32).reshape(len(tables), -1)
