"""What the engine's public face must know of a loaded model, besides its tokenizer."""

from dataclasses import dataclass, field

from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelDescription:
    name: str
    """What answers call the model."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """The checkpoint's own advice for temperature, top_p and the like; a request's values win."""
    other_names: tuple[str, ...] = ()
    """What requests may call it as well: the checkpoint's name, which is what people type."""
