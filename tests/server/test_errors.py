"""What clients and the log are told of errors that are not the client's doing."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import DeviceError
from everycast.server.errors import describe
from everycast.server.routes import ServerLimits, Service, make_router
from fastapi import FastAPI
from fastapi.testclient import TestClient


def test_a_device_that_was_lost_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Every request after it fails as well: a traceback for each would bury the reason."""
    with caplog.at_level(logging.ERROR, logger="everycast.server"):
        status, body = describe(DeviceError("cuda:0 was lost; start the program again"))
    assert status == 503 and body["error"]["type"] == "server_error"
    assert "cuda" not in str(body) and "its log says why" in str(body["error"]["message"])
    (record,) = caplog.records
    assert record.getMessage() == "cuda:0 was lost; start the program again"
    assert record.exc_info is None


def test_an_unexpected_error_is_told_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="everycast.server"):
        status, body = describe(KeyError("a secret"))
    assert status == 500 and "secret" not in str(body)
    assert caplog.records[0].exc_info


def test_health_tells_of_a_failed_device_until_it_works() -> None:
    """Those who watch a server must see that it has to be started again."""
    engine: Any = SimpleNamespace()
    service = Service(engine, ServerLimits(), 0)
    app = FastAPI()
    app.include_router(make_router(service))
    client = TestClient(app)

    def health() -> int:
        return client.get("/health").status_code

    assert health() == 200
    with pytest.raises(DeviceError), service.admitted():
        raise DeviceError("lost")
    assert health() == 503 and service.num_active_requests == 0
    with pytest.raises(ValueError), service.admitted():
        raise ValueError
    assert health() == 503
    with service.admitted():
        pass
    assert health() == 200
