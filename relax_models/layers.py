"""The few layers that every decoder is made of. A layer knows how its weight is stored, not where
it will run: `operators` says what is computed, a target's schedules say how."""

from tvm.relax.frontend import nn

from ..artifact.tensor_format import TensorFormat

FLOAT32 = TensorFormat("float32")


class Weight(nn.Module):
    """A matrix [n, k] in some `TensorFormat`, as one parameter for each of the format's parts.

    It starts as float32; `quant_schemes.layers.apply_formats` gives it the format of a scheme.
    """

    bias: nn.Parameter | None = None

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.format = FLOAT32
        self.set_format(FLOAT32)

    def set_format(self, fmt: TensorFormat) -> None:
        """Replace the parameters by those that `fmt` needs."""
        for part in self.format.parts(self.n, self.k):
            self.__dict__.pop(part, None)
        self.format = fmt
        for part, (shape, dtype) in fmt.parts(self.n, self.k).items():
            setattr(self, part, nn.Parameter(shape, dtype))

    def parts(self) -> list[nn.Tensor]:
        """The parameters, in the order of `TensorFormat.parts`."""
        return [getattr(self, part) for part in self.format.parts(self.n, self.k)]


class Linear(Weight):
    """y = x Wᵀ (+ bias), W: [out_features, in_features]; bias is float32."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(out_features, in_features)
        if bias:
            self.bias = nn.Parameter((out_features,), "float32")


class Embedding(Weight):
    """A table of `num_embeddings` rows of `hidden_size`; tied models also use it as the head."""

    def __init__(self, num_embeddings: int, hidden_size: int) -> None:
        super().__init__(num_embeddings, hidden_size)


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang & Sennrich, 2019); weight is float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.size, self.epsilon = size, epsilon
        self.weight = nn.Parameter((size,), "float32")
