"""From samples to rows, the table and the file: medians, ratios, percent of the limit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from everycast.benchmarks.limits import Machine, ModelCost, step_cost
from everycast.benchmarks.report import details, table
from everycast.benchmarks.results import Results
from everycast.benchmarks.rows import Row, Subject, rows_of
from everycast.benchmarks.samples import OURS, Samples
from everycast.benchmarks.works import parse_work

COST = ModelCost(
    weight_bytes=1000, kv_bytes_per_token=1.0, num_block_parameters=400, num_head_parameters=100
)
SUBJECT = Subject("m", 2, "int8", "native", 4.5, 4.6, COST)
ISSUE_FIELDS = {
    "work", "model", "threads", "ours", "peer", "theirs", "ratio", "percent_of_limit",
    "bits_per_weight", "peer_bits_per_weight",
}  # fmt: skip


def samples_of(work: str, **figures: list[float]) -> Samples:
    samples = Samples()
    for engine, values in figures.items():
        samples.figures[work][engine.replace("__", ", ").replace("_", " ")] = values
    return samples


def only_row(samples: Samples, work: str) -> Row:
    (row,) = rows_of(SUBJECT, [parse_work(work)], samples)
    return row


def test_medians_and_ratios_of_the_rounds() -> None:
    row = only_row(samples_of("decode", everycast=[10, 30, 20], a=[5, 10, 20]), "decode")
    assert (row.ours, row.theirs, row.ratio) == (20, 10, 2)
    assert (row.ratio_low, row.ratio_high, row.rounds) == (1, 3, 3)
    assert (row.peer, row.unit, row.percent_of_limit, row.limit) == ("a", "tokens/s", None, None)
    assert (row.bits_per_weight, row.peer_bits_per_weight) == (4.5, 4.6)


@pytest.mark.parametrize(("work", "theirs"), [("decode", 12), ("memory", 9), ("start", 9)])
def test_the_better_way_of_a_peer_counts(work: str, theirs: float) -> None:
    samples = samples_of(work, everycast=[6, 6], a=[9, 9], a__huge_pages=[12, 12])
    row = only_row(samples, work)
    assert row.theirs == theirs
    assert row.peer_variant == ("huge pages" if theirs == 12 else "")
    assert row.unit == {"decode": "tokens/s", "memory": "MB", "start": "s"}[work]


def test_a_limit_for_what_each_side_reads() -> None:
    """A greedy step of ours does without a part of the weights; a peer reads them all."""
    samples = samples_of("decode", everycast=[6], a=[6])
    samples.limits.update({"read": [1e6], "multiply": [1e9]})
    cost = replace(COST, kv_bytes_per_token=0, unread_weight_bytes=250)
    (row,) = rows_of(replace(SUBJECT, cost=cost), [parse_work("decode")], samples)
    assert row.percent_of_limit == pytest.approx(100 * 6 * 750 / 1e6, abs=0.06)
    assert row.peer_percent_of_limit == pytest.approx(100 * 6 * 1000 / 1e6, abs=0.06)
    assert row.bytes_per_step == 750


def test_a_row_for_each_peer_and_one_without() -> None:
    peers = samples_of("decode", everycast=[4], a=[1], b=[2])
    assert [row.peer for row in rows_of(SUBJECT, [parse_work("decode")], peers)] == ["a", "b"]
    row = only_row(samples_of("decode", everycast=[4]), "decode")
    assert (row.peer, row.theirs, row.ratio, row.peer_bits_per_weight) == (None,) * 4
    assert rows_of(SUBJECT, [parse_work("start")], peers) == []


def test_a_round_that_was_cut_short() -> None:
    row = only_row(samples_of("decode", everycast=[4, 6, 8], a=[2, 3]), "decode")
    assert (row.ratio_low, row.ratio_high) == (2, 2)


def test_a_peer_says_its_own_bits() -> None:
    samples = samples_of("decode", everycast=[1], a=[1])
    samples.ready["a"] = {"bits_per_weight": 5.8}
    assert only_row(samples, "decode").peer_bits_per_weight == 5.8


def test_percent_of_what_the_machine_did_in_the_same_rounds() -> None:
    samples = samples_of("decode", everycast=[50], a=[25])
    samples.limits["read"] = [1e5, 108_000, 2e5]
    samples.limits["multiply"] = [1e9]
    row = only_row(samples, "decode")
    # 1000 bytes of weights and 16 + 64 tokens of context: 100 steps a second.
    assert (row.percent_of_limit, row.peer_percent_of_limit) == (50, 25)
    assert row.limit == "0.0 GB/s" and row.bytes_per_step == 1080


def test_costs_of_a_step() -> None:
    machine = Machine(bytes_per_s=1000, operations_per_s=1000)
    prefill = step_cost(parse_work("prefill_10"), COST)
    assert prefill is not None and prefill.operations == 10 * 800 + 200
    assert prefill.seconds(machine) == 8.2 and prefill.bound(machine) == "0 GOP/s"
    batch = step_cost(parse_work("batch_4"), COST)
    assert batch is not None and batch.tokens == 4
    assert (batch.num_bytes, batch.operations) == (1000 + 4 * 48, 4 * 1000)
    assert step_cost(parse_work("serve_4"), COST) is None


def test_the_file_has_the_agreed_fields_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "out" / "bench.json"
    results = Results(path)
    works = [parse_work("decode")]
    first = samples_of("decode", everycast=[2], a=[1])
    first.limits["read"], first.limits["multiply"] = [1e9], [1e9]
    first.ready["a"] = {"version": "1"}
    results.add("one", 2, rows_of(SUBJECT, works, first), first)
    results.add("two", 2, [], samples_of("start"))
    record = json.loads(path.read_text())
    assert set(record) == {"rows", "machine", "samples"}
    assert ISSUE_FIELDS <= set(record["rows"][0]) and len(record["rows"]) == 1
    assert record["samples"]["one"]["figures"]["decode"] == {"everycast": [2], "a": [1]}
    assert set(record["samples"]) == {"one", "two"}
    assert record["machine"]["engines"] == {"a": {"version": "1"}}
    assert record["machine"]["limits"]["2"]["bytes_per_s"] == 1e9
    assert "cpu" in record["machine"] and "versions" in record["machine"]


def test_the_table_has_a_line_for_each_row() -> None:
    samples = samples_of("decode", everycast=[200], a__huge_pages=[100])
    samples.limits["read"], samples.limits["multiply"] = [1e9], [1e9]
    alone = samples_of("start", everycast=[0.7])
    rows = [only_row(samples, "decode"), only_row(alone, "start")]
    lines = table(rows).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| 200 tokens/s | a (huge pages) | 100 | **2.00** (2.00-2.00) |" in lines[2]
    assert "0.7 s" in lines[3]


def test_details_are_medians() -> None:
    samples = samples_of("serve_4", everycast=[1, 1, 1])
    samples.details["serve_4"][OURS] = [{"ttft_ms_p50": v} for v in (1.0, 3.0, 2.0)]
    row = only_row(samples, "serve_4")
    assert row.details == {"ttft_ms_p50": 2.0} and row.peer_details == {}
    assert details([row]) == "serve_4, 2 threads, everycast: ttft_ms_p50 2"
