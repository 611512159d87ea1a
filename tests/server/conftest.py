"""A real server on loopback over a scripted model, and the official client."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
from everycast.engine.async_mlc_engine import AsyncMLCEngine
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.model_description import ModelDescription
from everycast.engine.scripted_model import Script, ScriptedModel
from everycast.engine.tokenizer import Tokenizer, TokenizerConfig
from everycast.server.routes import ServerLimits
from everycast.server.run import bind, make_server, url
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAGE_SIZE = 16
PADDED_VOCAB = 320
TIMEOUT_S = 20.0


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    port: int
    engine: AsyncMLCEngine
    model: ScriptedModel
    client: openai.OpenAI
    http: httpx.Client
    is_stopped: threading.Event
    stop: Callable[[], None]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def send(self, path: str, body: bytes) -> socket.socket:
        """A raw connection on which a POST was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection

    def wait_until_idle(self) -> None:
        """Wait until nothing runs and every page can be had again."""
        self.wait_until(lambda: self.engine.metrics().num_running_sequences == 0)
        metrics = self.engine.metrics()
        assert metrics.num_waiting_sequences == 0
        assert metrics.num_available_pages == metrics.num_pages


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes as tokens (ids 3 to 258), three special tokens (0 to 2), ChatML."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    hf = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(special)
    config = TokenizerConfig({"eos_token": "<|im_end|>"}, {"default": CHATML})
    return Tokenizer(hf.to_str(), config)


Serve = Callable[..., Running]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Serve]:
    """Starts servers; they are stopped at the end of the test."""
    with ExitStack() as stack:

        def start(
            script: Script,
            *,
            context_window_size: int = 512,
            step_time_s: float = 0.0,
            limits: ServerLimits | None = None,
            max_num_sequence: int = 8,
            grace_s: float = 10.0,
        ) -> Running:
            model = ScriptedModel(
                script,
                vocab_size=PADDED_VOCAB,
                num_pages=128,
                page_size=PAGE_SIZE,
                step_time_s=step_time_s,
            )
            schedule = ScheduleLimits(
                max_num_sequence=max_num_sequence,
                prefill_chunk_size=32,
                context_window_size=context_window_size,
                page_size=PAGE_SIZE,
                num_pages=128,
            )
            loop = EngineLoop(
                model, schedule, tokenizer_size=len(tokenizer.special_ids) + 256, eos_token_ids=(2,)
            )
            engine = AsyncMLCEngine.from_parts(
                loop, tokenizer, ModelDescription("scripted", other_names=("script",))
            )
            return stack.enter_context(_running(engine, model, limits, grace_s))

        yield start


@contextmanager
def _running(
    engine: AsyncMLCEngine, model: ScriptedModel, limits: ServerLimits | None, grace_s: float
) -> Iterator[Running]:
    bound = bind("127.0.0.1", 0)
    server = make_server(engine, limits, grace_s=grace_s)
    is_stopped = threading.Event()

    def run() -> None:
        server.run(sockets=[bound])
        is_stopped.set()

    thread = threading.Thread(target=run)

    def stop() -> None:
        server.should_exit = True

    address, port = url(bound), bound.getsockname()[1]
    client = openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    )
    http = httpx.Client(base_url=address, timeout=TIMEOUT_S, verify=False)  # it is not TLS
    running = Running(address, port, engine, model, client, http, is_stopped, stop)
    thread.start()
    try:
        running.wait_until(lambda: server.started)
        yield running
    finally:
        client.close()
        http.close()
        stop()
        thread.join(TIMEOUT_S)
        bound.close()
    assert is_stopped.is_set() and model.is_closed
