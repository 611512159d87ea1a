"""Give a model's layers the formats of a scheme."""

from collections.abc import Mapping

from tvm.relax.frontend import nn

from ..artifact.tensor_format import TensorFormat
from ..relax_models.layers import Weight


def apply_formats(model: nn.Module, formats: Mapping[str, TensorFormat]) -> None:
    """Set the storage of every matrix: `formats` is by parameter name (`….weight`).

    Raises KeyError for a matrix without a format.
    """
    for name, layer in named_weights(model).items():
        layer.set_format(formats[name])


def named_weights(model: nn.Module) -> dict[str, Weight]:
    """Every matrix of the model by its parameter name, in order."""
    found: dict[str, Weight] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        if isinstance(module, Weight):
            found[f"{prefix}weight"] = module
            return
        if isinstance(module, nn.ModuleList):
            for index, child in enumerate(module):
                visit(f"{prefix}{index}.", child)
            return
        for name, child in vars(module).items():
            if isinstance(child, nn.Module):
                visit(f"{prefix}{name}.", child)

    visit("", model)
    return found
