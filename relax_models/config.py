"""The configuration of every Llama-like decoder."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..artifact.errors import CheckpointError
from .rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder in the field names of Hugging Face; what models differ in is spelled out.

    `layer_windows[i]` is the sliding window of layer i: query position q sees key position k
    iff 0 <= q - k < window; None means every earlier position. `layer_ropes[i]` says which of
    `ropes` layer i rotates with. `attention_scale` multiplies q·k, `embedding_scale` the token
    embeddings. `qk_norm` is an RMSNorm over each head of q and k; `post_norms` are RMSNorms over
    the outputs of attention and MLP, before the residual sum.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_scale: float
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    attention_bias: bool = False
    """Biases on q, k and v."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise CheckpointError(f"{self.model_type} config: {message}")

        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
            "rms_norm_eps", "attention_scale", "embedding_scale",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive, got {value}")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )
        require(
            self.activation in get_args(Activation), f"activation {self.activation!r} is unknown"
        )
        for name in ("layer_ropes", "layer_windows"):
            count = len(getattr(self, name))
            require(
                count == self.num_hidden_layers,
                f"{name} has {count} entries for {self.num_hidden_layers} layers",
            )
        for rope in self.ropes:
            require(
                rope.rotary_dim == self.head_dim,
                f"rope rotates {rope.rotary_dim} of {self.head_dim} values of a head",
            )
        require(
            all(0 <= i < len(self.ropes) for i in self.layer_ropes),
            f"layer_ropes {self.layer_ropes} must index {len(self.ropes)} ropes",
        )
        require(
            all(window is None or window > 0 for window in self.layer_windows),
            f"a sliding window must be positive, got {self.layer_windows}",
        )
