"""The parent's side of a build, over small programs that stand in for the compiler."""

import sys
import textwrap
from pathlib import Path

import pytest
from everycast import build_process
from everycast.artifact import errors
from everycast.build_process import BuildProgress, build


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch):
    """`child(code)`: what the child process runs; `request` there is what it was sent."""

    def set_up(code: str, *, reads: bool = True) -> None:
        head = "import json, os, signal, sys, time\n"
        if reads:
            head += "request = json.load(sys.stdin)\n"
        head += "def say(**message): print(json.dumps(message), flush=True)\n"
        command = (sys.executable, "-c", head + textwrap.dedent(code))
        monkeypatch.setattr(build_process, "COMMAND", command)

    return set_up


def test_the_request_and_the_answer(child, tmp_path: Path) -> None:
    child("assert request['dump_ir'] is None\nsay(artifact=request['output'] + '/' + str(request))")
    built = build(
        tmp_path / "模型.gguf", "cpu:znver4", "q0f32", tmp_path / "dist", activations="int8",
        context_window_size=99,
    )  # fmt: skip
    assert built.is_relative_to(tmp_path / "dist")
    for part in ("模型.gguf", "cpu:znver4", "q0f32", "int8", "99"):
        assert part in str(built)


def test_progress(child) -> None:
    child(
        """
        say(progress=dict(stage="weights", done=1, total=2, unit="bytes"))
        say(progress=dict(stage="compile", done=0, total=0))
        say(artifact="/dist/m")
        """
    )
    seen: list[BuildProgress] = []
    assert build("m", progress=seen.append) == Path("/dist/m")
    assert seen == [BuildProgress("weights", 1, 2, "bytes"), BuildProgress("compile", 0, 0)]
    assert build("m") == Path("/dist/m")


def test_noise_on_stdout_is_passed_over(child) -> None:
    child(
        r"""
        print("a library says hello")
        for noise in ("[1]", "7", "null", '"text"', '{"other": 1}', "{", ""):
            print(noise)
        sys.stdout.flush()
        os.write(1, b"\xff\xfe not UTF-8\n")
        say(artifact="/dist/m")
        print("bye", flush=True)
        """
    )
    assert build("m") == Path("/dist/m")


@pytest.mark.parametrize(
    "kind", ["CheckpointError", "CompileError", "ArtifactError", "CapacityError", "RequestError"]
)
def test_errors_keep_their_kind(child, kind: str) -> None:
    child(f"say(error=dict(type={kind!r}, message='one line'))\nsys.exit(2)")
    with pytest.raises(getattr(errors, kind)) as caught:
        build("m")
    assert type(caught.value).__name__ == kind and str(caught.value) == "one line"


def test_an_unknown_kind_is_a_compile_error(child) -> None:
    child("say(error=dict(type='Surprise', message='one line'))")
    with pytest.raises(errors.CompileError, match="one line"):
        build("m")


def test_a_killed_child_is_told_as_such(child) -> None:
    child("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(errors.CompileError, match=r"ended by signal SIGKILL.*memory"):
        build("m")


def test_a_child_that_ends_without_a_word(child) -> None:
    child("sys.exit(3)")
    with pytest.raises(errors.CompileError, match=r"without an answer \(exit code 3\)"):
        build("m")


def test_a_child_that_dies_before_it_reads(child) -> None:
    child("os.close(0)\nos._exit(4)", reads=False)
    with pytest.raises(errors.CompileError, match="exit code 4"):
        build("m" * 200_000)  # more than a pipe holds


def test_an_interrupted_parent_ends_the_child(child, tmp_path: Path) -> None:
    child(
        f"""
        def end(*_):
            open({str(tmp_path / "ended")!r}, "w").close()
            sys.exit(143)
        signal.signal(signal.SIGTERM, end)
        say(progress=dict(stage="compile", done=0, total=0))
        time.sleep(60)
        """
    )

    def interrupt(progress: BuildProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("m", progress=interrupt)
    assert (tmp_path / "ended").exists()


def test_the_current_folder_lends_no_modules(tmp_path: Path, monkeypatch) -> None:
    """A user's folder may well hold a `tvm` or a `json.py`."""
    for name in ("json", "numpy", "everycast"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('wrong module')")
    monkeypatch.chdir(tmp_path)
    *options, module = build_process.COMMAND
    assert (options[-1], module) == ("-m", "everycast.targets.build")
    script = "import json, numpy, everycast; print(json.dumps({'artifact': everycast.__file__}))"
    monkeypatch.setattr(build_process, "COMMAND", (*options[:-1], "-c", script))
    assert not build("m").is_relative_to(tmp_path)
