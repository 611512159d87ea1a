"""The command line over a scripted model."""

from pathlib import Path

import pytest
from everycast import build_process, cli
from everycast.engine import loader
from fake_machine import FakeMachine, Result, Run


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine()
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVERYCAST_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_process, "build", machine.build)
    monkeypatch.setattr(loader, "open_artifact", machine.open_artifact)
    return machine


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        out, err = capfd.readouterr()
        code = caught.value.code
        return Result(code=0 if code is None else code, out=out, err=err)

    return run
