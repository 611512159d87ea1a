"""Pictures of the rows: bars beside the peers, cost against context and batch, and a roofline."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifact.errors import EverycastError
from .limits import Machine
from .rows import Row
from .works import GROUPS, parse_work

OURS = "everycast"
_COLORS = {
    OURS: "#1f6feb",
    "llama.cpp": "#e8833a",
    "ik_llama.cpp": "#c9a227",
    "openvino": "#7d5ba6",
    "onnxruntime-genai": "#4c9a6a",
}
_SWEPT = frozenset((*GROUPS["contexts"], *GROUPS["batches"]))
_SHOWN = frozenset({"decode_4096", "batch_8", "batch_32"})
_IMAGE_SUFFIXES = frozenset({".png", ".svg", ".pdf"})
_DPI = 130


def draw(rows: Sequence[Row], machines: Mapping[int, Machine], path: Path) -> list[Path]:
    """Draw what the rows have data for: a picture each in the folder `path`, or all in one file if
    it ends in .png, .svg or .pdf. machines: what was measured, by number of threads.

    The paths written, empty if there is nothing to draw. Raises EverycastError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise EverycastError(
            "--plot needs the package matplotlib: pip install 'everycast[bench]'"
        ) from None
    charts: dict[str, Callable[[Any], None]] = {}
    if any(_is_bar(row) for row in rows):
        charts["peers"] = lambda axes: _peers(axes, rows)
    if len({_number(row, "decode") for row in rows} - {None}) > 1:
        charts["context"] = lambda axes: _context(axes, rows)
    if len({_number(row, "batch") for row in rows} - {None}) > 1:
        charts["batch"] = lambda axes: _batch(axes, rows)
    if machines and any(row.bytes_per_step for row in rows):
        charts["roofline"] = lambda axes: _roofline(axes, rows, machines)
    if not charts:
        return []
    if path.suffix.lower() in _IMAGE_SUFFIXES:
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = min(2, len(charts))
        lines = -(-len(charts) // columns)
        figure = Figure(figsize=(7.5 * columns, 4.6 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flat
        for panel, chart in zip(panels, charts.values(), strict=False):
            chart(panel)
        for panel in list(panels)[len(charts) :]:
            panel.set_axis_off()
        figure.savefig(path, dpi=_DPI)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for name, chart in charts.items():
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        chart(figure.subplots())
        written.append(path / f"{name}.png")
        figure.savefig(written[-1], dpi=_DPI)
    return written


def _number(row: Row, kind: str) -> int | None:
    """N of a row of work `kind_N`; `decode` counts as its prompt's length."""
    work = parse_work(row.work)
    if work.kind != kind:
        return None
    return work.streams if kind == "batch" else work.prompt_tokens


def _is_bar(row: Row) -> bool:
    """Of the works that are measured at many N, two or three have bars; the rest are lines."""
    swept = row.work in _SWEPT and row.work not in _SHOWN
    return row.peer is not None and row.unit == "tokens/s" and not swept


def _peers(axes: Any, rows: Sequence[Row]) -> None:
    """Ratio of ours to each peer, a group of bars for each work."""
    chosen = [row for row in rows if _is_bar(row)]
    groups = list(dict.fromkeys((row.work, row.threads, row.activations) for row in chosen))
    peers = list(dict.fromkeys(row.peer for row in chosen if row.peer))
    width = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        ratios = {
            (row.work, row.threads, row.activations): row for row in chosen if row.peer == peer
        }
        places = [g + (i - (len(peers) - 1) / 2) * width for g in range(len(groups))]
        found = [
            (p, ratios[g].ratio or 0) for p, g in zip(places, groups, strict=True) if g in ratios
        ]
        bars = axes.bar(
            [p for p, _ in found], [r for _, r in found], width,
            label=peer, color=_COLORS.get(peer),
        )  # fmt: skip
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.axhline(1, color="black", linewidth=1)
    several = len({group[2] for group in groups}) > 1
    names = [
        f"{work.replace('_', ' ')}, {threads} thr." + (f", {mode}" if several else "")
        for work, threads, mode in groups
    ]
    axes.set_xticks(
        range(len(groups)), names, fontsize=8, rotation=30, ha="right", rotation_mode="anchor"
    )
    axes.set_ylabel("everycast's tokens/s by the peer's")
    axes.set_title(f"{chosen[0].model}: times as fast as")
    axes.margins(y=0.12)
    axes.legend(fontsize=8)


def _context(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "decode", lambda rate: 1e3 / rate)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms a token, one stream")
    axes.set_title(f"{rows[0].model}: cost of a token")


def _batch(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "batch", lambda rate: rate)
    axes.set_xlabel("streams together")
    axes.set_ylabel("tokens/s of all streams")
    axes.set_title(f"{rows[0].model}: throughput")


def _lines(axes: Any, rows: Sequence[Row], kind: str, value: Callable[[float], float]) -> None:
    """A line for each engine, number of threads and mode, over N."""
    lines: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    modes = {row.activations for row in rows}
    for row in rows:
        number = _number(row, kind)
        if number is None:
            continue
        mode = f", {row.activations}" if len(modes) > 1 else ""
        lines[OURS, f"{OURS}{mode}, {_threads(row.threads)}"][number] = value(row.ours)
        if row.peer and row.theirs:
            label = f"{row.peer}, {_threads(row.threads)}"
            lines[row.peer, label][number] = value(row.theirs)
    for (engine, label), points in lines.items():
        style = "-" if label.endswith(" 1 thread") else "--"
        places = sorted(points)
        axes.plot(
            places, [points[place] for place in places], style, marker="o", markersize=4,
            label=label, color=_COLORS.get(engine),
        )  # fmt: skip
    places = sorted({place for points in lines.values() for place in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _roofline(axes: Any, rows: Sequence[Row], machines: Mapping[int, Machine]) -> None:
    """Operations a second against operations a byte: the machine's roof, our works as points."""
    points = []
    for row in {(r.work, r.threads, r.activations): r for r in rows}.values():
        if not row.bytes_per_step or not row.operations_per_step:
            continue
        work = parse_work(row.work)
        tokens = work.prompt_tokens if work.kind == "prefill" else work.streams
        rate = row.operations_per_step * row.ours / tokens / 1e9
        points.append((row, row.operations_per_step / row.bytes_per_step, rate))
    low = min(intensity for _, intensity, _ in points) / 2
    high = max(intensity for _, intensity, _ in points) * 2
    colors = dict(zip(sorted(machines), ("#1f6feb", "#e8833a", "#4c9a6a", "#7d5ba6"), strict=False))
    for threads, machine in sorted(machines.items()):
        knee = machine.operations_per_s / machine.bytes_per_s
        places = sorted({low, min(max(knee, low), high), high})
        roof = [
            min(machine.operations_per_s, place * machine.bytes_per_s) / 1e9 for place in places
        ]
        axes.plot(
            places, roof, color=colors.get(threads),
            label=f"{_threads(threads)}: {machine.bytes_per_s / 1e9:.0f} GB/s, "
            f"{machine.operations_per_s / 1e9:.0f} GOP/s",
        )  # fmt: skip
    for row, intensity, rate in points:
        axes.plot([intensity], [rate], "o", color=colors.get(row.threads), markersize=5)
        axes.annotate(
            row.work.replace("_", " "), (intensity, rate), fontsize=7,
            xytext=(4, -9), textcoords="offset points",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("int8 operations a byte read")
    axes.set_ylabel("GOP/s")
    axes.set_title(f"{rows[0].model}: roofline, points are everycast's works")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
