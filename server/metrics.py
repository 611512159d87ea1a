"""The engine's numbers in Prometheus' text format (version 0.0.4)."""

from dataclasses import asdict

from ..engine.metrics import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus_text(metrics: EngineMetrics, *, num_active_requests: int) -> str:
    """Counters end in `_total`; sizes of queues and pages are gauges."""
    values = asdict(metrics)
    counters = values.pop("counters")
    counters["num_preemptions"] = values.pop("num_preemptions")
    counters["num_prefix_hit_tokens"] = values.pop("num_prefix_hit_tokens")
    lines: list[str] = []
    for name, value in counters.items():
        lines += _metric(f"{name.removeprefix('num_')}_total", "counter", value)
    for name, value in {**values, "num_active_requests": num_active_requests}.items():
        lines += _metric(name.removeprefix("num_"), "gauge", value)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, value: float) -> tuple[str, str]:
    name = f"everycast_{name}"
    return f"# TYPE {name} {kind}", f"{name} {value}"
