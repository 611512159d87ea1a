"""What quantization costs: perplexity of models under several schemes, against bits per weight.

    python -m everycast.benchmarks.quality MODEL... --text book.txt --output quality.json \\
        [--schemes gguf,q4f16_1] [--tokens 2000] [--activations auto] [--plot quality.png]

Each model is quantized, compiled and run by the product itself. The first tokens of the text are
scored in one window, with a begin token where the model's tokenizer puts one. `gguf` is a GGUF
imported without loss; every other scheme starts from the same weights as floats in another order
(see `shuffled_gguf`). Rows of the output file that are not measured again are kept; the plot shows
the rows of auto activations.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from ..artifact.host import running_versions
from ..artifact.manifest import read_manifest
from ..build_process import build
from ..engine.mlc_engine import MLCEngine
from ..evaluation import measure_perplexity, read_text
from ..relax_models.checkpoint.resolve import open_checkpoint
from .machine import cpu_name
from .shuffled_gguf import write_shuffled

LOSSLESS = "gguf"
SCHEMES = (LOSSLESS, "q8f16_1", "q5af16_e8", "q4af16_e8", "q4f16_e8", "q4f16_1", "q3f16_1", "q0f32")
"""q4f16_0 stores the values of q4f16_1 in another layout."""
PLOT_LIMIT = 2.5
"""Perplexities above so many times the source's are not drawn."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one scheme. `num_bytes` is that of the artifact's tensors."""

    model: str
    quantization: str
    activations: str
    bits_per_weight: float
    num_bytes: int
    perplexity: float
    num_scored_tokens: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.quantization, self.activations


@contextmanager
def float_source(model: str) -> Iterator[str]:
    """What to quantize: a shuffled float copy of a GGUF, any other checkpoint as it is."""
    checkpoint = open_checkpoint(model)
    if checkpoint.kind != "gguf":
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        path = Path(folder) / "shuffled.gguf"
        write_shuffled(checkpoint.path, path)
        yield str(path)


def measure(
    model: str, source: str, scheme: str, activations: str, text: str, num_tokens: int
) -> Row:
    """Build `source` in a temporary folder and score the text; the row is called `model`."""
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        artifact = build(source, "cpu", scheme, folder, activations=activations)
        weights = read_manifest(artifact).weights
        config = {"context_window_size": num_tokens}
        with MLCEngine(artifact, mode="interactive", engine_config=config) as engine:
            result = measure_perplexity(engine, text, num_tokens)
    return Row(
        model,
        scheme,
        activations,
        weights.bits_per_weight,
        weights.num_bytes,
        round(result.perplexity, 4),
        result.num_scored_tokens,
    )


def read_rows(path: Path) -> dict[tuple[str, str, str], Row]:
    if not path.exists():
        return {}
    rows = [Row(**values) for values in json.loads(path.read_text())["rows"]]
    return {row.key: row for row in rows}


def write_rows(path: Path, rows: Sequence[Row], text: dict[str, Any]) -> None:
    document = {
        "text": text,
        "machine": cpu_name(),
        "versions": asdict(running_versions()),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def source_row(rows: Sequence[Row], model: str) -> Row | None:
    """The row of the model as it is: without loss, or else in float32."""
    for quantization in (LOSSLESS, "q0f32"):
        for row in rows:
            if (row.model, row.quantization, row.activations) == (model, quantization, "auto"):
                return row
    return None


def print_table(rows: Sequence[Row]) -> None:
    """Markdown: a line per row; `loss` is the mean negative log likelihood beyond the source's, in
    nats a token."""
    print("| model | quantization | activations | bits per weight | perplexity | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        source = source_row(rows, row.model)
        loss = math.log(row.perplexity / source.perplexity) if source else math.nan
        print(
            f"| {row.model} | {row.quantization} | {row.activations} | {row.bits_per_weight:.2f} "
            f"| {row.perplexity:.3f} | {loss:+.4f} |"
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Perplexity against bits per weight, a panel per model: perplexities of models with different
    tokenizers cannot be compared. The dashed line is the source; what is far above it is named
    with its perplexity and not drawn."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(3.6 * len(models), 3.4), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        source = source_row(rows, model)
        limit = source.perplexity * PLOT_LIMIT if source else math.inf
        if source is not None:
            panel.axhline(source.perplexity, color="0.6", linewidth=1, linestyle="--")
        outside = []
        for row in rows:
            # 32 bits would squeeze all others together.
            if row.model != model or row.activations != "auto" or row.quantization == "q0f32":
                continue
            if row.perplexity > limit:
                outside.append(f"{row.quantization}: {row.perplexity:.0f}")
                continue
            point = (row.bits_per_weight, row.perplexity)
            panel.plot(*point, "o", markersize=4, color="C0")
            panel.annotate(
                row.quantization, point, xytext=(4, 3), textcoords="offset points", fontsize=7
            )
        panel.annotate(
            "\n".join(outside), (0.97, 0.97), xycoords="axes fraction", ha="right", va="top",
            fontsize=7,
        )  # fmt: skip
        panel.set(title=model, xlabel="bits per weight, whole model")
        panel.margins(x=0.25, y=0.1)
    panels[0][0].set_ylabel("perplexity")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="none: show what was measured")
    parser.add_argument("--text", type=Path, help="a UTF-8 text")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of all rows")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--activations", default="auto", help="such as auto,int8,float32")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--plot", type=Path, help="PNG file of perplexity against bits")
    options = parser.parse_args()
    if options.models and options.text is None:
        parser.error("--text is needed")
    rows = read_rows(options.output)
    if options.models:
        text = read_text(options.text)
        about = {
            "name": options.text.name,
            "sha256": sha256(options.text.read_bytes()).hexdigest(),
            "num_tokens": options.tokens,
        }
        schemes = options.schemes.split(",")
        for model in options.models:
            with float_source(model) as floats:
                for scheme, activations in product(schemes, options.activations.split(",")):
                    source = model if scheme == LOSSLESS else floats
                    row = measure(model, source, scheme, activations, text, options.tokens)
                    rows[row.key] = row
                    write_rows(options.output, list(rows.values()), about)
                    print(json.dumps(asdict(row)), flush=True)
    print_table(list(rows.values()))
    if options.plot is not None:
        plot(list(rows.values()), options.plot)


if __name__ == "__main__":
    main()
