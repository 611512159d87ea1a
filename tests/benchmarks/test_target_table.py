from everycast.benchmarks.target_table import Clock, table


def test_rows_are_targets_and_columns_models() -> None:
    results = {"one": {"cpu": (1_500_000, 2.0), "cuda": (4_949_000, 22.54)}, "two": {"cpu": (5, 1)}}
    assert table(results).splitlines() == [
        "| target | one | two |",
        "| --- | --- | --- |",
        "| `cpu` | 1.50 MB, 2.0 s | 0.00 MB, 1.0 s |",
        "| `cuda` | 4.95 MB, 22.5 s | - |",
    ]


def test_only_libraries_are_timed() -> None:
    clock = Clock()
    for stage, total in (("open", 0), ("weights", 9), ("compile", 0), ("compile", 1)):
        clock(stage, total, total, "steps")
    assert len(clock.seconds) == 1 and clock.seconds[0] >= 0
