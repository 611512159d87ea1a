import json
import logging

import pytest
from everycast.artifact import tuning
from everycast.artifact.errors import CompileError
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.isa import CpuIsa
from everycast.schedules.cpu.linear_operator import LinearOperator
from everycast.schedules.cpu.packing import PackedWeight
from everycast.schedules.cpu.tuning.records import (
    check_parameters,
    cpu_name,
    cpu_records,
    tuned_schedule,
)
from everycast.schedules.tuning.records import (
    Record,
    Records,
    read_records,
    user_file,
    write_records,
)
from tvm.target import Target

CPU = "znver4-00000000"
ISA = CpuIsa("avx512", 16, 32, "avx512vnni")
OPERATOR = LinearOperator(
    weights=(PackedWeight(TensorFormat("float16", 4, 32, 8), 64, 64),), biases=(False,), terms=1
)


def record(**parameters):
    return Record(parameters, 24, 12.5, 11.25)


def some(**buckets):
    return Records(CPU, {OPERATOR.name: buckets})


def test_round_trip(tmp_path):
    path = tmp_path / "new" / f"{CPU}.json"
    assert read_records(path, CPU, check_parameters) == Records(CPU)
    records = some(many=record(tile_tokens=16), one=record())
    write_records(path, records)
    assert read_records(path, CPU, check_parameters) == records
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_schedule_has_what_was_found_and_else_the_default():
    default = OPERATOR.default_schedule(ISA)
    assert tuned_schedule(Records(CPU), OPERATOR, ISA) == default
    tuned = some(many=record(tile_tokens=16), few=record(), one=record(prefetch_one=1024))
    schedule = tuned_schedule(tuned, OPERATOR, ISA)
    assert (schedule.tile_tokens, schedule.prefetch_one) == (16, 1024)
    assert schedule.with_parameters({"tile_tokens": 8, "prefetch_one": 0}) == default


def test_the_users_records_win(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    shipped = some(many=record(tile_tokens=4), one=record(prefetch_one=2048))
    shipped.operators["another"] = {"one": record()}
    write_records(tmp_path / "shipped" / f"{CPU}.json", shipped)
    assert cpu_records(CPU) == shipped
    write_records(user_file(CPU), some(many=record()))
    both = cpu_records(CPU).operators
    assert both[OPERATOR.name] == {"many": record(), "one": record(prefetch_one=2048)}
    assert "another" in both


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"version": 2}),
        json.dumps({"version": 2, "device": "another", "operators": {}}),
        json.dumps({"version": 2, "device": CPU, "operators": {"x": {"one": {"trials": 1}}}}),
        json.dumps(
            {
                "version": 2,
                "device": CPU,
                "operators": {
                    "x": {
                        "one": {
                            "parameters": {"unknown": 1},
                            "trials": 1,
                            "default_us": 1,
                            "tuned_us": 1,
                        }
                    }
                },
            }
        ),
    ],
)
def test_damaged_files(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(CompileError, match=r"x\.json.*delete the file"):
        read_records(path, CPU, check_parameters)


def test_another_version_is_said_and_not_used(tmp_path, caplog):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"version": 0, "device": CPU}))
    with caplog.at_level(logging.WARNING):
        assert read_records(path, CPU, check_parameters) == Records(CPU)
    assert "another version" in caplog.text


def test_a_cpu_is_its_features():
    target = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "znver4"}
    name = cpu_name(Target(target))
    assert name.startswith("znver4-")
    assert cpu_name(Target({**target, "mattr": ["-avx512vnni"]})) != name
    assert cpu_name(Target({**target, "mcpu": "znver3"})) != name
    assert cpu_name(Target({**target, "mattr": ["+avx512vnni"]})) == name
