"""How many prompt tokens a step may hold while other sequences wait for their next token.

All sequences of a step wait until it ends: beside 512 prompt tokens those that decode would stand
still for a tenth of a second on a small CPU. Fewer prompt tokens a step cost throughput, since the
weights are read again for each. So the budget is what fits into a time, found by trying: halved
after a step that took longer, doubled after one that says that twice as much fits.
"""

from .scheduler import StepPlan

LONGEST_STEP_S = 0.05
"""Between two tokens of a sequence this is still 20 tokens a second, faster than one reads."""
LEAST_TOKENS = 64
"""Below this, prompts get slower faster than steps get shorter."""
_FIRST_TOKENS = 128


class PrefillBudget:
    """`num_tokens` is the budget of the next step."""

    def __init__(self, step_tokens: int) -> None:
        """step_tokens: most tokens of a step, and so the largest budget."""
        self._most, self._least = step_tokens, min(LEAST_TOKENS, step_tokens)
        self.num_tokens = min(_FIRST_TOKENS, step_tokens)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """What the step took. Only one that had decoding sequences and used all of the budget says
        something about it."""
        num_decodes = sum([chunk.is_decode for chunk in plan.chunks])
        if not num_decodes or plan.num_tokens - num_decodes < self.num_tokens:
            return
        if seconds > LONGEST_STEP_S:
            self.num_tokens = max(self.num_tokens // 2, self._least)
        elif seconds / plan.num_tokens * (plan.num_tokens + self.num_tokens) < LONGEST_STEP_S:
            self.num_tokens = min(2 * self.num_tokens, self._most)
