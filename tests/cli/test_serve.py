"""`everycast serve`."""

import re
import threading
import time
from typing import Any

import httpx
import pytest
from everycast import cli
from everycast.server import run as server_run
from fake_machine import FakeMachine, Run


def test_serve_refuses_a_taken_port_before_it_builds(run: Run, machine: FakeMachine) -> None:
    from everycast.server.run import bind

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        result = run("serve", "m", "--port", str(taken.getsockname()[1]))
    assert result.code == 2 and "choose another --port" in result.err
    assert not machine.builds


def test_serve(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = []
    make_server = server_run.make_server

    def spy(*arguments: Any) -> Any:
        servers.append(make_server(*arguments))
        return servers[-1]

    monkeypatch.setattr(server_run, "make_server", spy)
    codes: list[Any] = []

    def serve() -> None:
        try:
            options = ["--max-num-sequence", "3", "--threads", "2", "--activations", "int8"]
            cli.main(["serve", "m", "--port", "0", *options])
        except SystemExit as end:
            codes.append(end.code)

    thread = threading.Thread(target=serve)
    thread.start()
    deadline = time.monotonic() + 20
    while not (servers and servers[0].started):
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    err = capfd.readouterr().err
    found = re.search(r"serving scripted at (http://127\.0\.0\.1:\d+/v1)", err)
    assert found is not None
    messages = [{"role": "user", "content": "hello"}]
    with httpx.Client(base_url=found[1], verify=False) as client:
        answer = client.post("/chat/completions", json={"messages": messages, "temperature": 0})
    servers[0].should_exit = True
    thread.join(20)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert codes in ([0], [None])
    assert [build["activations"] for build in machine.builds] == ["int8"]
    assert machine.opened[0][1:] == (
        "server",
        {
            "max_num_sequence": 3,
            "max_total_seq_length": None,
            "context_window_size": None,
            "num_threads": 2,
        },
    )
