"""A step plan as the small integer tensors that a model runner takes."""

import numpy as np

from .model_runner import StepInput
from .scheduler import StepPlan


def build_step_input(plan: StepPlan, arg_max_ids: int = 0) -> StepInput:
    """The plan's tokens. Rows of logits: per chunk its prompt rows, then the sampled row."""
    chunks = plan.chunks
    input_ids = np.empty(plan.num_tokens, dtype=np.int32)
    positions = np.empty(plan.num_tokens, dtype=np.int32)
    query_offsets = np.zeros(len(chunks) + 1, dtype=np.int32)
    num_blocks = max(len(chunk.sequence.block_table) for chunk in chunks)
    block_tables = np.zeros((len(chunks), num_blocks), dtype=np.int32)
    logit_rows: list[int] = []
    offset = 0
    for i, chunk in enumerate(chunks):
        sequence, first = chunk.sequence, chunk.first_token
        end = offset + chunk.num_tokens
        if chunk.num_tokens == 1:
            input_ids[offset] = sequence.token_ids[first]
            positions[offset] = first
        else:
            input_ids[offset:end] = sequence.token_ids[first : first + chunk.num_tokens]
            positions[offset:end] = np.arange(first, first + chunk.num_tokens)
        logit_rows.extend(offset + position - first for position in chunk.prompt_rows)
        if chunk.is_sampled:
            logit_rows.append(end - 1)
        block_tables[i, : len(sequence.block_table)] = sequence.block_table
        query_offsets[i + 1] = offset = end
    rows = np.array(logit_rows, dtype=np.int32)
    return StepInput(input_ids, positions, query_offsets, block_tables, rows, arg_max_ids)
