"""What goes wrong below the client library: bad bodies, limits, clients that leave, shutdown."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from everycast.artifact.errors import CapacityError
from everycast.engine.tokenizer import Tokenizer
from everycast.server.routes import ServerLimits
from everycast.server.run import bind, url

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Serve = Callable[..., Any]
OPENAI_FIELDS = {"message", "type", "param", "code"}


def forever(history: tuple[int, ...]) -> int:
    """A model that never stops by itself; every token is one letter."""
    return 70


def error_of(response: httpx.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == OPENAI_FIELDS and error["message"]
    assert "Traceback" not in response.text and ".py" not in response.text
    return error


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": 1}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "temperatur": 1}',
    b'{"prompt": "a", "self": 1}',
    b'{"prompt": "a", "model": {}}',
    b'{"prompt": "a", "stream": "yes"}',
    b'{"prompt": "a", "max_tokens": 1.5}',
    b'{"prompt": "a", "max_tokens": 1000000000000000000000000}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": [99999]}',
]


def test_bad_bodies(serve: Serve) -> None:
    server = serve(forever)
    for body in BAD_BODIES:
        response = server.http.post(COMPLETIONS, content=body)
        assert response.status_code in (400, 404), body
        error_of(response)
    good = server.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
    assert good.status_code == 200


def test_unknown_routes_and_methods(serve: Serve) -> None:
    server = serve(forever)
    for path in ("/", "/v1", "/v1/nothing", "/v1/chat/completions/", "/docs"):
        response = server.http.get(path)
        assert response.status_code == 404
        assert error_of(response)["type"] == "not_found_error"
    response = server.http.get(CHAT)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error_of(response)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit(serve: Serve, is_chunked: bool) -> None:
    server = serve(forever, limits=ServerLimits(max_body_bytes=1000))
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    content = (body[i : i + 100] for i in range(0, len(body), 100)) if is_chunked else body
    response = server.http.post(COMPLETIONS, content=content)
    assert response.status_code == 413
    assert "1000" in (error_of(response)["message"] or "")
    assert server.http.get("/health").status_code == 200


def test_too_many_requests(serve: Serve) -> None:
    server = serve(forever, limits=ServerLimits(max_requests=1), step_time_s=0.005)
    stream = server.client.completions.create(model="scripted", prompt="a", stream=True)
    next(stream)
    for is_streamed in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            server.client.completions.create(model="scripted", prompt="a", stream=is_streamed)
        assert caught.value.response.headers["retry-after"] == "1"
    stream.close()
    server.wait_until_idle()
    server.client.completions.create(model="scripted", prompt="a", max_tokens=1)


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_frees_its_pages(serve: Serve, stream: bytes) -> None:
    """Case 18: during the answer, streamed or not, and nothing more is computed for it."""
    server = serve(forever, step_time_s=0.005, max_num_sequence=1)
    body = b'{"prompt": "a", "max_tokens": 400, "stream": ' + stream + b"}"
    connection = server.send(COMPLETIONS, body)
    server.wait_until(lambda: server.engine.metrics().counters.num_output_tokens >= 3)
    waiting: list[str] = []

    def wait_in_line() -> None:
        answer = server.client.completions.create(model="scripted", prompt="b", max_tokens=2)
        waiting.append(answer.choices[0].text)

    next_client = threading.Thread(target=wait_in_line)
    next_client.start()
    server.wait_until(lambda: server.engine.metrics().num_waiting_sequences == 1)
    connection.close()
    next_client.join(10)
    assert waiting and len(waiting[0]) == 2
    server.wait_until_idle()
    metrics = server.engine.metrics()
    assert metrics.counters.num_aborted_requests == 1
    assert metrics.counters.num_output_tokens < 200


def test_a_client_that_leaves_during_prefill(serve: Serve, tokenizer: Tokenizer) -> None:
    """Case 18: 480 tokens are 15 steps of 32; it leaves after a few of them."""
    server = serve(forever, step_time_s=0.03)
    body = b'{"prompt": "' + b"a" * 480 + b'", "max_tokens": 8, "stream": true}'
    connection = server.send(COMPLETIONS, body)
    server.wait_until(lambda: server.model.num_tokens_computed >= 64)
    connection.close()
    server.wait_until(lambda: server.engine.metrics().counters.num_aborted_requests == 1)
    server.wait_until_idle()
    num_computed = server.model.num_tokens_computed
    assert num_computed < 480
    time.sleep(0.1)
    assert server.model.num_tokens_computed == num_computed


def test_a_client_that_leaves_before_its_body_is_complete(serve: Serve) -> None:
    server = serve(forever)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
    connection.close()
    assert server.http.get("/health").status_code == 200
    server.wait_until_idle()


def test_shutdown_lets_answers_finish(serve: Serve) -> None:
    server = serve(forever, step_time_s=0.01)
    stream = server.client.completions.create(
        model="scripted", prompt="a", max_tokens=30, stream=True
    )
    text = next(stream).choices[0].text
    server.stop()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert len(text) == 30
    assert server.is_stopped.wait(10)
    with pytest.raises(httpx.ConnectError):
        server.http.get("/health")


def test_shutdown_ends_answers_that_take_too_long(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    server = serve(forever, step_time_s=0.02, grace_s=0.3)
    arguments = {"model": "scripted", "prompt": "a", "max_tokens": 500}
    whole: list[str | None] = []

    def wait_for_all() -> None:
        answer = server.client.completions.create(**arguments)
        whole.append(answer.choices[0].finish_reason)

    thread = threading.Thread(target=wait_for_all)
    thread.start()
    stream = server.client.completions.create(**arguments, stream=True)
    next(stream)
    server.stop()
    *_, last = stream
    thread.join(10)
    assert last.choices[0].finish_reason == "abort" and whole == ["abort"]
    assert server.is_stopped.wait(10)
    assert capfd.readouterr().err == ""


def test_an_address_that_is_taken_is_one_line() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        first.listen()
        assert url(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(CapacityError, match=rf"port {port}: .*; choose another --port"):
            bind("127.0.0.1", port)
    with pytest.raises(CapacityError, match="--host"):
        bind("no.such.host.invalid", 0)


def test_all_addresses_are_shown_as_the_loopback() -> None:
    with bind("0.0.0.0", 0) as everywhere:
        assert url(everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}"
