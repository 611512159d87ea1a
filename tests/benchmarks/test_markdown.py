"""Rows of a file as a table."""

from everycast.benchmarks.markdown import HEADER, markdown

ROW = {
    "work": "decode", "activations": "mixed", "threads": 2, "ours": 301.44, "unit": "tokens/s",
    "peer": "llama.cpp", "theirs": 150.0, "ratio": 2.0096, "ratio_low": 1.9, "ratio_high": 2.1,
    "percent_of_limit": 80.2, "peer_percent_of_limit": 40.1, "bits_per_weight": 5.34,
    "peer_bits_per_weight": 5.34,
}  # fmt: skip


def test_a_line_for_each_row_with_a_peer() -> None:
    alone = ROW | {"peer": None}
    start = ROW | {"work": "start", "ours": 0.5, "theirs": 0.25, "unit": "s",
                   "percent_of_limit": None}  # fmt: skip
    header, rule, first, second = markdown([ROW, alone, start]).splitlines()
    assert header == HEADER
    assert rule.count("|") == header.count("|") == first.count("|") == second.count("|")
    assert first == (
        "| decode | mixed | 2 | 301.4 | llama.cpp | 150 | **2.01** (1.90-2.10) | 80 % / 40 % "
        "| 5.34 / 5.34 |"
    )
    assert "| 0.5 s |" in second and "|  |" in second
