"""The command line over a scripted model: no checkpoint, no compiler, no download."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from everycast import build_process, chat_session, cli
from everycast.artifact.errors import CapacityError, CheckpointError
from everycast.artifact.host import Versions
from everycast.artifact.manifest import (
    LibraryStamp,
    Limits,
    Manifest,
    ModelStamp,
    WeightsStamp,
    write_manifest,
)
from everycast.build_process import BuildProgress
from everycast.engine import loader
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.mlc_engine import MLCEngine
from everycast.engine.model_description import ModelDescription
from everycast.engine.scripted_model import Script, ScriptedModel
from everycast.engine.tokenizer import Tokenizer, TokenizerConfig
from everycast.server import run as server_run
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 2
LIMITS = ScheduleLimits(
    max_num_sequence=4,
    prefill_chunk_size=64,
    context_window_size=256,
    page_size=16,
    num_pages=32,
)
SCRIPTED = "a scripted model"


def make_tokenizer(*, has_template: bool = True) -> Tokenizer:
    """Bytes as tokens, three special ones."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = HFTokenizer(models.BPE({t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(special)
    templates = {"default": CHATML} if has_template else {}
    return Tokenizer(hf.to_str(), TokenizerConfig({"eos_token": "<|im_end|>"}, templates))


def echo(tokenizer: Tokenizer, start: str, end: str, answer: str = "") -> Script:
    """Answers with `answer`, or with the text between the last `start` and `end`."""

    def script(history: tuple[int, ...]) -> int:
        text = b"".join(map(tokenizer.id_to_bytes, history))
        asked, _, done = text.rpartition(end.encode())
        wanted = answer.encode() or asked.rpartition(start.encode())[2]
        ids = tokenizer.encode(wanted.decode(), add_bos=False)
        return ids[len(done)] if len(done) < len(ids) else END

    return script


def chat_script(tokenizer: Tokenizer, answer: str = "") -> Script:
    """Repeats the user's last message, or says `answer`."""
    return echo(tokenizer, "user\n", "<|im_end|>\n<|im_start|>assistant\n", answer)


def scripted_parts(
    script: Script, tokenizer: Tokenizer, *, step_time_s: float = 0.0
) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
    model = ScriptedModel(script, vocab_size=259, num_pages=32, step_time_s=step_time_s)
    loop = EngineLoop(model, LIMITS, tokenizer_size=259, eos_token_ids=(END,))
    return loop, tokenizer, ModelDescription("scripted")


class FakeMachine:
    """Stands in for the compiler and the loader."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.answer = ""
        self.script: Script | None = None
        self.error: Exception | None = None
        self.builds: list[dict[str, Any]] = []
        self.opened: list[tuple[Path, str, dict[str, Any]]] = []

    def build(
        self,
        model: str | Path,
        target: str | None = "cpu",
        quantization: str | None = None,
        output: str | Path = "dist",
        *,
        progress: Callable[[BuildProgress], None] | None = None,
        **options: Any,
    ) -> Path:
        self.builds.append({"model": model, "target": target, **options})
        if progress is not None:
            progress(BuildProgress("weights", 1, 2, "bytes"))
            progress(BuildProgress("compile", 0, 0))
        if self.error is not None:
            raise self.error
        path = Path(output) / "m-q4f16_1"
        path.mkdir(parents=True, exist_ok=True)
        versions = Versions("1", "2", "3")
        library = LibraryStamp(
            "lib/cpu.so", "0", "any", {}, (), versions, "b", "d", Limits(64, 4, 16, 128)
        )
        manifest = Manifest(
            versions,
            ModelStamp("m", "llama", "LlamaForCausalLM", str(model), "a", "b", 1000),
            WeightsStamp(quantization or "q4f16_1", 4.5, 1000, "c", "d"),
            {target: library} if target else {},
        )
        write_manifest(path, manifest)
        return path

    def open_artifact(
        self, folder: Path, device: str, model_lib: None, mode: str, config: dict[str, Any]
    ) -> "FakeArtifact":
        self.opened.append((folder, mode, config))
        script = self.script or chat_script(self.tokenizer, self.answer)
        return FakeArtifact(script, self.tokenizer, f"device: {device}")


@dataclass(frozen=True)
class FakeArtifact:
    script: Script
    tokenizer: Tokenizer
    choice: str
    memory: None = None

    @property
    def plan(self) -> Any:
        return SimpleNamespace(summary=lambda: "memory: 1 MB")

    def load(self, progress: Any) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
        return scripted_parts(self.script, self.tokenizer)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine()
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVERYCAST_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_process, "build", machine.build)
    monkeypatch.setattr(loader, "open_artifact", machine.open_artifact)
    return machine


class Result(SimpleNamespace):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        out, err = capfd.readouterr()
        code = caught.value.code
        return Result(code=0 if code is None else code, out=out, err=err)

    return run


COMMANDS = ("convert", "compile", "chat", "serve", "list", "rm", "perplexity", "bench", "doctor")


def test_help_of_every_command_has_an_example(run: Run) -> None:
    text = run("--help").out
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE)
        result = run(command, "--help")
        assert result.code == 0 and f"Example: everycast {command}" in result.out


def test_version(run: Run) -> None:
    from everycast import __version__

    assert run("--version").out == f"everycast {__version__}\n"


def test_help_imports_neither_engine_nor_compiler_nor_server() -> None:
    script = (
        "import sys; from everycast import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = 'numpy rich tvm tvm_ffi fastapi pydantic tokenizers jinja2'.split()\n"
        "print('loaded:', *(set(heavy) & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    )
    assert result.stdout.splitlines()[-1] == "loaded:"


def test_chat_json(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "grüß dich 😀", "--temperature", "0", "--json")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert set(answer) == {
        "text", "token_ids", "prompt_tokens", "ttft_s", "decode_tokens_per_s",
    }  # fmt: skip
    assert answer["text"] == "grüß dich 😀"
    assert machine.tokenizer.decode(answer["token_ids"]) == answer["text"]
    assert answer["prompt_tokens"] > 20
    assert 0 < answer["ttft_s"] < 10 and answer["decode_tokens_per_s"] > 0


def test_chat_shows_plan_text_and_speed(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "hello", "--temperature", "0")
    assert result.out == "hello\n"
    shown = ("weights", "compile", "device: cpu", "memory: 1 MB", "6 tokens", "tokens/s", "first")
    for part in shown:
        assert part in result.err
    quiet = run("chat", "m", "--prompt", "hello", "--temperature", "0", "--quiet")
    assert (quiet.out, quiet.err) == ("hello\n", "")


def test_chat_builds_once_and_passes_its_options(run: Run, machine: FakeMachine) -> None:
    arguments = ("chat", "m", "--prompt", "a", "-q", "q0f32", "--context-window-size", "99")
    run(*arguments)
    run(*arguments, "--max-tokens", "1", "--seed", "1", "--system", "Be brief.")
    assert len(machine.builds) == 1
    (folder, mode, config), _ = machine.opened
    assert folder.name == "m-q4f16_1" and mode == "interactive"
    assert config == {"context_window_size": 99, "num_threads": None}


def test_chat_reads_the_prompt_from_a_pipe(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"from a pipe")
    os.close(write_end)
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("chat", "m", "--temperature", "0", "--quiet").out == "from a pipe\n"


def test_a_base_model_continues_the_text(run: Run, machine: FakeMachine) -> None:
    machine.tokenizer = make_tokenizer(has_template=False)
    machine.script = echo(machine.tokenizer, "", "Once upon", " a time")
    result = run("chat", "m", "--prompt", "Once upon", "--temperature", "0")
    assert result.out == " a time\n" and "no chat template" in result.err


@pytest.mark.parametrize("max_tokens", ["0", "1"])
def test_an_answer_too_short_to_time(run: Run, machine: FakeMachine, max_tokens: str) -> None:
    result = run("chat", "m", "--prompt", "hi", "--max-tokens", max_tokens, "--json")
    answer = json.loads(result.out)
    assert len(answer["token_ids"]) == int(max_tokens)
    assert answer["decode_tokens_per_s"] is None


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("model.safetensors is a git-lfs pointer; run git lfs pull"),
        CapacityError("needs 9 GB, there are 2 GB"),
        OSError(28, "No space left on device"),
    ],
)
def test_errors_are_one_line(run: Run, machine: FakeMachine, error: Exception) -> None:
    machine.error = error
    for arguments in (("compile", "m"), ("chat", "m", "--prompt", "a"), ("convert", "m")):
        result = run(*arguments, *(["--quiet"] if arguments[0] != "chat" else []))
        assert result.code == 2 and result.out == ""
        last = result.err.splitlines()[-1]
        assert last.startswith("error: ") and str(error) in last
        assert "Traceback" not in result.err


def test_an_unexpected_error_says_how_to_see_more(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.error = ZeroDivisionError("by zero\nreally")
    result = run("compile", "m", "--json")
    assert result.code == 1 and len(result.err.splitlines()) == 1
    assert "ZeroDivisionError: by zero really" in result.err and "EVERYCAST_DEBUG=1" in result.err
    monkeypatch.setenv("EVERYCAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["compile", "m"])


def test_ctrl_c_is_130(run: Run, machine: FakeMachine) -> None:
    machine.error = KeyboardInterrupt()  # type: ignore[assignment]
    assert run("compile", "m").code == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "./missing.gguf"),
        ("chat",),
        ("chat", "m", "--max-tokens", "-1"),
        ("serve", "m", "--port", "70000"),
        ("nothing",),
        ("rm", "nothing"),
        ("perplexity", "m", "--text", "missing.txt"),
        ("bench",),
        ("bench", "m", "--works", "chatting"),
        ("bench", "m", "--against", "lama.cpp"),
        ("bench", "m", "--threads", "0"),
        ("bench", "m", "--rounds", "0"),
        ("bench", "--shape", "llama-3"),
        ("bench", "m", "--peer-isa", "sse"),
        ("bench", "./missing.gguf"),
    ],
)
def test_wrong_arguments(run: Run, machine: FakeMachine, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2 and "rror: " in result.err and "Traceback" not in result.err
    assert not machine.builds


def test_a_request_error_of_the_engine(run: Run, machine: FakeMachine) -> None:
    result = run("chat", "m", "--prompt", "a" * 300)
    assert result.code == 2 and "256" in result.err.splitlines()[-1]
    assert run("chat", "m", "--prompt", "a", "--temperature", "-1").code == 2


def test_compile_prints_the_path_and_the_next_command(run: Run, machine: FakeMachine) -> None:
    result = run("compile", "./x y", "-q", "q0f32", "-o", "out put", "--activations", "int8")
    path = Path("out put") / "m-q4f16_1"
    assert result.out == f"{path}\n"
    assert f"next: everycast chat '{path}'" in result.err
    assert machine.builds[0]["activations"] == "int8"
    as_json = json.loads(run("compile", "m", "--json").out)
    assert as_json["quantization"] == "q4f16_1" and as_json["bits_per_weight"] == 4.5


def test_convert_writes_no_library(run: Run, machine: FakeMachine) -> None:
    result = run("convert", "m")
    assert machine.builds[0]["target"] is None
    assert "next: everycast compile m" in result.err


def test_list_and_rm(run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    run("compile", "m", "--json")
    run("chat", "smollm2-135m", "--prompt", "a", "--json")
    record = json.loads(run("list", "--json").out)
    in_cache, in_dist = record["built"]
    assert in_cache["model"] == "smollm2-135m" and in_cache["targets"] == ["cpu"]
    assert in_dist["path"] == "dist/m-q4f16_1" and in_dist["bits_per_weight"] == 4.5
    assert "smollm2-135m" in {known["name"] for known in record["known"]}
    table = run("list").out
    assert in_cache["path"] in table and "4.50" in table

    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert run("rm", "smollm2-135m").code == 1 and Path(in_cache["path"]).exists()
    assert run("rm", "smollm2-135m", "--yes").code == 0
    assert not Path(in_cache["path"]).exists()
    (Path(in_dist["path"]) / "everycast.json").write_text("{")
    assert "cannot be read" in run("list").out or "cannot read" in run("list").out
    assert run("rm", in_dist["path"], "--yes").code == 0
    assert not Path(in_dist["path"]).exists() and Path("dist").exists()


def test_perplexity(run: Run, machine: FakeMachine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("\ufeffgrün\r\nund mehr".encode())
    arguments = ("perplexity", "m", "--text", str(text), "--tokens", "10", "--json")
    result = json.loads(run(*arguments).out)
    assert set(result) == {"perplexity", "num_scored_tokens", "seconds"}
    assert result["num_scored_tokens"] == 9
    assert machine.opened[0][2] == {"context_window_size": 10}
    # The script's logit is 20, all others 0, and it never foresees this text.
    expected = pow(2.718281828459045, 20) + 258
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert run("perplexity", "m", "--text", str(text)).out.startswith("perplexity ")
    text.write_bytes("grün\nund mehr".encode())  # the same text on another system
    assert run(*arguments, "--activations", "int8").out.startswith("{")
    assert [build["activations"] for build in machine.builds] == ["auto", "int8"]
    text.write_bytes(b"\xff")
    assert "not UTF-8" in run(*arguments).err


def test_bench_passes_its_options(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everycast.benchmarks import command

    seen: list[Any] = []
    monkeypatch.setattr(command, "run_bench", seen.append)
    arguments = ("--against", "openvino", "--works", "decode_512,memory", "--rounds", "3")
    assert run("bench", "m", *arguments, "--json", "o.json", "--plot", "p.png").code == 0
    assert run("bench", "--shape", "qwen3-0.6b", "--activations", "auto,int8").code == 0
    first, second = seen
    assert (first.model, first.rounds, first.json, first.plot) == (
        "m", 3, Path("o.json"), Path("p.png"),
    )  # fmt: skip
    assert [work.name for work in first.works] == ["decode_512", "memory"]
    assert [peer.name for peer in first.peers] == ["openvino"]
    assert (second.shape, second.activations) == ("qwen3-0.6b", ("auto", "int8"))
    assert [work.name for work in second.works] == [
        "decode", "prefill_128", "prefill_512", "batch_8", "batch_32",
    ]  # fmt: skip


def test_doctor(run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor", "--json")
    report = json.loads(result.out)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert {"python", "apache-tvm", "tvm runtime", "cpu", "memory", "cache", "threads"} <= set(
        statuses
    )
    assert statuses["target cpu"] == "ok" and statuses["target webgpu"] == "info"
    assert report["ok"] == ("fail" not in statuses.values()) == (result.code == 0)
    monkeypatch.setattr("everycast.doctor._installed_version", lambda name: "0.1")
    broken = run("doctor")
    assert broken.code == 1
    assert re.search(r"^fail +apache-tvm .*pip install 'apache-tvm==", broken.out, re.MULTILINE)


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


def test_a_terminal_sees_bars(
    run: Run, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run("compile", "m[/x]").code == 0
    assert "1 B of 2 B" in terminal.getvalue() and "compile" in terminal.getvalue()


# The conversation


@pytest.fixture
def engine() -> Iterator[MLCEngine]:
    tokenizer = make_tokenizer()
    with MLCEngine.from_parts(*scripted_parts(chat_script(tokenizer), tokenizer)) as engine:
        yield engine


def test_ctrl_c_stops_the_answer_and_frees_its_pages(engine: MLCEngine) -> None:
    session = chat_session.Session(engine, None, {"temperature": 0})

    def show(text: str) -> None:
        if text == "c":
            raise KeyboardInterrupt

    answer = session.answer([{"role": "user", "content": "abcdefgh"}], show)
    assert answer.text == "abc" and answer.finish_reason == "interrupted"
    deadline = time.monotonic() + 10
    while engine.metrics().num_available_pages != engine.metrics().num_pages:
        assert time.monotonic() < deadline
    assert session.answer([{"role": "user", "content": "xyz"}]).text == "xyz"


def converse(
    engine: MLCEngine, inputs: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(inputs)

    def read(prompt: str) -> str:
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    chat_session.converse(chat_session.Session(engine, None, {"temperature": 0}))


def test_a_conversation(
    engine: MLCEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(
        engine,
        [
            "/help", "", "one", "/stats", KeyboardInterrupt, "two \\", "three", "/frob", "/reset",
            "/etc/passwd is a file",
        ],
        monkeypatch,
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert out == "one\ntwo \nthree\n/etc/passwd is a file\n"
    for part in ("/reset", "32 of 32 KV pages free", "Ctrl-D", "/frob is no command", "forgotten"):
        assert part in err


def test_a_conversation_that_outgrows_the_context(
    engine: MLCEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(engine, ["a" * 150, "b" * 100, "/reset", "c", "/exit", "never"], monkeypatch)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "c" and "b" not in out and "never" not in out
    assert "256" in err and "/reset" in err


def test_history_is_in_the_prompt(engine: MLCEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    answer = chat_session.Session.answer

    def spy(self: Any, turns: list[dict[str, str]], *show: Any) -> chat_session.Answer:
        seen.append(len(turns))
        return answer(self, turns, *show)

    monkeypatch.setattr(chat_session.Session, "answer", spy)
    converse(engine, ["a", "b", "/reset", "c"], monkeypatch)
    assert seen == [1, 3, 1]


def test_control_characters_never_reach_the_terminal() -> None:
    from everycast.console import plain

    assert plain("a\x1b[2J\tb\nc\x07\x9b1m 世界") == "a[2J\tb\nc1m 世界"


def test_a_real_terminal() -> None:
    """A pasted text of two lines is one message; a signal stops the answer; Ctrl-D leaves."""
    script = textwrap.dedent(f"""
        import sys, importlib.util
        spec = importlib.util.spec_from_file_location("test_cli", {__file__!r})
        module = importlib.util.module_from_spec(spec)
        sys.modules["test_cli"] = module
        spec.loader.exec_module(module)
        tokenizer = module.make_tokenizer()
        parts = module.scripted_parts(
            module.chat_script(tokenizer), tokenizer, step_time_s=0.01
        )
        with module.MLCEngine.from_parts(*parts) as engine:
            module.chat_session.converse(
                module.chat_session.Session(engine, None, {{"temperature": 0}})
            )
    """)
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(secondary)
    seen = b""

    def until(mark: bytes) -> None:
        nonlocal seen
        while mark not in seen:
            seen += os.read(primary, 4096)
        seen = seen.partition(mark)[2]

    try:
        until(b">>> ")
        os.write(primary, b"\x1b[200~one\ntwo\x1b[201~\n")
        until(b"one\r\ntwo\r\n\x1b[2m8 tokens")
        until(b">>> ")
        os.write(primary, b"x" * 100 + b"\n")
        until(b"x" * 100)
        until(b"xxx")
        process.send_signal(signal.SIGINT)
        until(b"stopped")
        until(b">>> ")
        os.write(primary, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)
