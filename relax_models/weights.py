"""Where a model's parameter comes from in a checkpoint."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Parameter = checkpoint tensor `name`, rows selected, then `add` added (1-D tensors only).

    A row selection works on float tensors and on quantized blocks alike, because blocks run along
    K: it un-permutes the Q and K of llama GGUFs and cuts fused projections apart.
    """

    name: str
    rows: np.ndarray | slice | None = None
    add: float = 0.0
