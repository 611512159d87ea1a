"""The `everycast` command: one function per command, which parses, calls one function, prints.

Imports are inside the functions, so that `--help` is instant and `chat` loads nothing it does not
need. MODEL is everywhere the same: a name (`everycast list` shows them), a Hugging Face folder,
`HF://org/name`, a GGUF file, or a folder that `everycast compile` wrote.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console
from .artifact.errors import EverycastError, RequestError

if TYPE_CHECKING:
    from .engine.mlc_engine import MLCEngine

app = typer.Typer(
    name="everycast",
    help="Compile a language model for this machine, chat with it, serve it.\n\n"
    "Example: everycast chat smollm2-135m",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would take longer to import than everything else here
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = "A name, a Hugging Face folder, HF://org/name, a GGUF file, or a compiled folder."
SCHEME_HELP = "Such as q4f16_1 or q0f32. Default: a GGUF as it is, a float model in 4 bits."
CONTEXT_HELP = "Most tokens of prompt and answer together."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Target = Annotated[str, typer.Option("--target", help="What to compile for: cpu or cpu:MCPU.")]
Quantization = Annotated[str | None, typer.Option("--quantization", "-q", help=SCHEME_HELP)]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the model's folder goes.")]
Context = Annotated[int | None, typer.Option("--context-window-size", min=1, help=CONTEXT_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no memory plan.")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default `sys.argv`; leaves with an exit code.

    0 fine, 1 `doctor` found something or an unexpected error, 2 wrong input or what it led to,
    130 Ctrl-C.
    """
    try:
        app(arguments, prog_name="everycast")
    except EverycastError as error:
        console.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if os.environ.get("EVERYCAST_DEBUG"):
            raise
        console.error(str(error))
    except Exception as error:
        if os.environ.get("EVERYCAST_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        console.error(f"unexpected {what} (set EVERYCAST_DEBUG=1 to see where, and report it)")
        sys.exit(1)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from . import __version__

        print(f"everycast {__version__}")
        raise typer.Exit


@app.command()
def convert(
    model: Model,
    quantization: Quantization = None,
    output: Output = Path("dist"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model's weights, tokenizer and configuration, without a library.

    Example: everycast convert ./Llama-3.2-1B -q q4f16_1
    """
    _build(model, None, quantization, output, quiet=quiet or json, as_json=json)


@app.command("compile")
def compile_model(
    model: Model,
    target: Target = "cpu",
    quantization: Quantization = None,
    output: Output = Path("dist"),
    context_window_size: Context = None,
    activations: Annotated[
        str, typer.Option(help="Inputs of quantized layers: auto, int8 or float32.")
    ] = "auto",
    dump_ir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the IR after each phase.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model with a library for a target: all that running it needs, in one folder.

    Example: everycast compile smollm2-135m --target cpu
    """
    _build(
        model,
        target,
        quantization,
        output,
        quiet=quiet or json,
        as_json=json,
        context_window_size=context_window_size,
        activations=activations,
        dump_ir=dump_ir,
    )


@app.command()
def chat(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Answer this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always answers the same.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")] = None,
    target: Target = "cpu",
    quantization: Quantization = None,
    context_window_size: Context = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model, or give it one --prompt (or standard input) and get one answer.

    Example: everycast chat smollm2-135m --prompt "What is the capital of France?"
    """
    from .chat_session import Session, converse, print_answer

    if prompt is None and (json or not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    config = {"context_window_size": context_window_size}
    with _open(model, target, quantization, "interactive", config, quiet=quiet or json) as engine:
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        session = Session(engine, system, options)
        if prompt is None:
            converse(session)
        elif json:
            console.print_json(session.answer([{"role": "user", "content": prompt}]).record())
        else:
            print_answer(session, [{"role": "user", "content": prompt}], quiet=quiet)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    mode: Annotated[str, typer.Option(help="local, interactive or server.")] = "server",
    max_num_sequence: Annotated[
        int | None, typer.Option(min=1, help="Most sequences that run together.")
    ] = None,
    max_total_seq_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV pages hold.")
    ] = None,
    context_window_size: Context = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Most requests at once; others get 429.")
    ] = 256,
    target: Target = "cpu",
    quantization: Quantization = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model with OpenAI's HTTP interface.

    Example: everycast serve smollm2-135m --port 8000
    """
    from .model_store import ensure_artifact
    from .server.run import run_server

    config = {
        "max_num_sequence": max_num_sequence,
        "max_total_seq_length": max_total_seq_length,
        "context_window_size": context_window_size,
    }
