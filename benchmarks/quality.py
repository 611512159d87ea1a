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


def print_table(rows: Sequence[Row]) -> None:
    """Markdown: a line per scheme; `loss` is the mean negative log likelihood beyond the source's,
    in nats a token."""
    source = {(r.model, r.activations): r for r in rows if r.quantization in ("gguf", "q0f32")}
    print("| model | quantization | activations | bits per weight | perplexity | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        reference = source.get((row.model, row.activations))
        loss = math.log(row.perplexity / reference.perplexity) if reference else math.nan
        print(
            f"| {row.model} | {row.quantization} | {row.activations} | {row.bits_per_weight:.2f} "
            f"| {row.perplexity:.3f} | {loss:+.4f} |"
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Perplexity against bits per weight, a panel per model: perplexities of models with different
    tokenizers cannot be compared."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4 * len(models), 3.6), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        of_model = [row for row in rows if row.model == model]
        source = next((r for r in of_model if r.quantization in ("gguf", "q0f32")), None)
        if source is not None:
            panel.axhline(source.perplexity, color="0.6", linewidth=1, linestyle="--")
        for row in of_model:
            if row.quantization == "q0f32":  # 32 bits would squeeze all others together
                continue
            panel.plot(row.bits_per_weight, row.perplexity, "o", markersize=4, color="C0")
            panel.annotate(
                row.quantization,
                (row.bits_per_weight, row.perplexity),
                xytext=(3, 3),
                textcoords="offset points",
                fontsize=7,
            )
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter("{x:.0f}")
        panel.yaxis.set_major_formatter("{x:.0f}")
        panel.set(title=model, xlabel="bits per weight, whole model")
        panel.margins(x=0.2)
    panels[0][0].set_ylabel("perplexity")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


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
        plot([row for row in rows.values() if row.activations == "auto"], options.plot)


if __name__ == "__main__":
    main()
