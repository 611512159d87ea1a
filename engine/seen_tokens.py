"""The tokens of one sequence and how often it has written them: what penalties must know."""

from collections.abc import Iterable

import numpy as np


class SeenTokens:
    """Each token of prompt and output once, in arrays that grow as tokens are added."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)

    @property
    def ids(self) -> np.ndarray:
        """[num_seen] int32; valid until the next token is added."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """[num_seen] int32: times in the output, 0 for a token of the prompt alone."""
        return self._counts[: len(self._places)]

    def add_output(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = np.zeros(max(16, place), np.int32)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room])
        self._ids[place] = token_id
        self._counts[place] += 1
