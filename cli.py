"""The `everycast` command: one function per command, which parses, calls one function, prints.

Imports are inside the functions, so that `--help` is instant and `chat` loads nothing it does not
need. MODEL is everywhere the same: a name (`everycast list` shows them), a Hugging Face folder,
`HF://org/name`, a GGUF file, or a folder that `everycast compile` wrote.

What several commands take is in `cli_options.py`. Still over 500 lines, because signatures
with their help are the command line itself, and belong side by side.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console
from .artifact.errors import EverycastError
from .cli_options import (
    Activations,
    Context,
    Device,
    Host,
    Json,
    Model,
    Models,
    Output,
    Port,
    Quantization,
    Quiet,
    Target,
    Threads,
    TunedDevice,
)

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

package_app = typer.Typer(
    help="Write what runs elsewhere, without everycast.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(package_app, name="package")


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
    """Write weights and tokenizer, without a library.

    \b
    Example: everycast convert ./Llama-3.2-1B -q q4f16_1
    """
    from .open_model import build_and_report

    build_and_report(model, None, quantization, output, quiet=quiet or json, as_json=json)


@app.command("compile")
def compile_model(
    model: Model,
    target: Target = "cpu",
    quantization: Quantization = None,
    output: Output = Path("dist"),
    context_window_size: Context = None,
    activations: Activations = "auto",
    dump_ir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the IR after each phase.")
    ] = None,
    device: TunedDevice = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write all that running a model needs in one folder.

    \b
    Example: everycast compile smollm2-135m --target cpu
    """
    from .open_model import build_and_report

    build_and_report(
        model,
        target,
        quantization,
        output,
        quiet=quiet or json,
        as_json=json,
        context_window_size=context_window_size,
        activations=activations,
        dump_ir=dump_ir,
        device=device,
    )


@app.command()
def chat(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Answer this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always answers the same.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")] = None,
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = "auto",
    context_window_size: Context = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model, or ask it one thing.

    With --prompt, or text on standard input, it answers once and leaves.

    \b
    Example: everycast chat smollm2-135m --prompt "What is the capital of France?"
    """
    from .chat_session import Session, converse, print_answer
    from .open_model import open_engine

    is_single = prompt is not None or json or not sys.stdin.isatty()
    if is_single and prompt is None:
        prompt = sys.stdin.read()
    config = {"context_window_size": context_window_size, "num_threads": threads}
    with open_engine(
        model, device, quantization, config, quiet=quiet or json, activations=activations
    ) as engine:
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        session = Session(engine, system, options)
        if not session.is_chat:
            console.note(f"{engine.model_name} has no chat template: it continues your text")
        if not is_single:
            converse(session)
            return
        turns = [{"role": "user", "content": prompt or ""}]
        answer = session.answer(turns) if json else print_answer(session, turns, quiet=quiet)
        if json:
            console.print_json(answer.record())
        if answer.finish_reason == "interrupted":
            raise typer.Exit(130)


@app.command()
def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    mode: Annotated[
        Literal["local", "interactive", "server"], typer.Option(help="Sizes for few or many.")
    ] = "server",
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
    threads: Threads = None,
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = "auto",
    quiet: Quiet = False,
) -> None:
    """Serve a model over OpenAI's HTTP interface.

    \b
    Example: everycast serve smollm2-135m --port 8000
    """
    from .engine.async_mlc_engine import AsyncMLCEngine
    from .open_model import load_parts
    from .server.routes import ServerLimits
    from .server.run import bind, run_server, url

    config = {
        "max_num_sequence": max_num_sequence,
        "max_total_seq_length": max_total_seq_length,
        "context_window_size": context_window_size,
        "num_threads": threads,
    }
    with bind(host, port) as bound:
        parts = load_parts(
            model, device, quantization, mode, config, quiet=quiet, activations=activations
        )
        engine = AsyncMLCEngine.from_parts(*parts)
        try:
            bound.listen()  # whoever waits for the next line may connect at once
            console.note(f"serving {engine.model_name} at {url(bound)}/v1 (Ctrl-C stops)")
            run_server(engine, bound, ServerLimits(max_requests=max_requests))
        finally:
            engine.terminate()


@app.command()
def web(
    models: Models,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    with_server: Annotated[
        bool,
        typer.Option("--with-server", help="Answer browsers without WebGPU from this machine."),
    ] = False,
    quantization: Quantization = None,
    quiet: Quiet = False,
) -> None:
    """Serve a chat page on which models run in the browser.

    Builds the models for WebGPU first, where they are not.

    \b
    Example: everycast web smollm2-135m
    """
    from .web_command import serve_web

    serve_web(models, quantization, host=host, port=port, with_server=with_server, quiet=quiet)


@package_app.command("web")
def package_web(
    models: Models,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    quantization: Quantization = None,
    quiet: Quiet = False,
) -> None:
    """Write the chat page and models as a folder for any static host.

    \b
    Example: everycast package web smollm2-135m -o site
    """
    from .web_command import package_web

    package_web(models, quantization, output, quiet=quiet)


@app.command("list")
def list_models(json: Json = False) -> None:
    """Show built models and those known by name.

    Built ones are looked for in the cache and in ./dist.

    \b
    Example: everycast list
    """
    from .model_store import stored_models
    from .relax_models.checkpoint.named_models import NAMED_MODELS

    built = [stored.record() for stored in stored_models(Path("dist"))]
    known = [
        {"name": name, "num_bytes": named.num_bytes, "licence": named.licence}
        for name, named in NAMED_MODELS.items()
    ]
    if json:
        console.print_json({"built": built, "known": known})
    else:
        console.print_models(built, known)
        console.note("next: everycast chat NAME, or everycast rm NAME")


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="A name or folder that list shows.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete built models.

    Only what everycast built is ever deleted; the checkpoint stays.

    \b
    Example: everycast rm smollm2-135m
    """
    from .model_store import folder_bytes, removable, remove

    folders = removable(name)
    for folder in folders:
        console.note(f"{folder} ({console.human_bytes(folder_bytes(folder))})")
    if not yes and not typer.confirm("Delete?", err=True):
        raise typer.Exit(1)
    freed = sum(remove(folder) for folder in folders)
    print(f"deleted {len(folders)}, {console.human_bytes(freed)} freed")


@app.command()
def perplexity(
    model: Model,
    text: Annotated[Path, typer.Option(help="A UTF-8 text.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to take from its start.")] = 2000,
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="Begin token; default: the tokenizer's.")
    ] = None,
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how well a model predicts a text.

    The first --tokens tokens are scored in one window.

    \b
    Example: everycast perplexity smollm2-135m --text book.txt --tokens 2000
    """
    from .evaluation import measure_perplexity, read_text
    from .open_model import open_engine

    content = read_text(text)
    config = {"context_window_size": tokens}
    with open_engine(
        model, device, quantization, config, quiet=quiet or json, activations=activations
    ) as engine:
        result = measure_perplexity(engine, content, tokens, bos=bos)
    if json:
        console.print_json(result.record())
    else:
        print(
            f"perplexity {result.perplexity:.4f} over {result.num_scored_tokens} tokens "
            f"({result.seconds:.1f} s)"
        )


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Argument(help="A name, or a GGUF file or folder.", show_default=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Peers by commas, such as llama.cpp,ik_llama.cpp.")
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads by commas.")] = "1",
    works: Annotated[
        str, typer.Option(help="What to measure, by commas.")
    ] = "decode,prefill_128,prefill_512,batch_8,batch_32",
    rounds: Annotated[int, typer.Option(min=1, help="Figures of each work; medians count.")] = 7,
    activations: Annotated[str, typer.Option(help="Modes of ours by commas.")] = "auto",
    device: Device = "cpu",
    shape: Annotated[
        str | None, typer.Option(help="Random weights of this shape instead of a model.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write rows and samples to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw what was measured in this folder.")
    ] = None,
    peer_isa: Annotated[
        Literal["native", "avx2"], typer.Option(help="avx2: both sides without AVX-512.")
    ] = "native",
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A Python that has a peer's package already."),
    ] = None,
) -> None:
    """Measure speed, memory and start, alone or beside other engines.

    All engines get the same weights (a GGUF in Q4_0) and threads, and do each work in turn while
    the others sleep. A peer is installed at its first use.

    \b
    Example: everycast bench smollm2-135m --against llama.cpp --threads 1,2 --json bench.json
    """
    from .benchmarks.command import run_bench
    from .benchmarks.options import parse_options

    options = parse_options(
        model,
        shape=shape,
        against=against,
        threads=threads,
        works=works,
        rounds=rounds,
        activations=activations,
        device=device,
        peer_isa=peer_isa,
        peer_python=peer_python or [],
        json=json,
        plot=plot,
    )
    run_bench(options)


@app.command()
def tune(
    model: Model,
    target: Target = "cpu",
    quantization: Quantization = None,
    activations: Activations = "auto",
    operator: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only operators whose name contains this.")
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Candidates for each operator and batch size.")
    ] = 24,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after this time; go on later.")
    ] = None,
    device: TunedDevice = None,
    rpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure through this RPC tracker.")
    ] = None,
    device_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The tracker's name for the machine.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search faster parameters for a model's kernels.

    Measures on this machine. Ctrl-C loses nothing that is finished; `compile` uses what was found.

    \b
    Example: everycast tune smollm2-135m --minutes 10
    """
    from .targets.tuning import TuneRequest
    from .tune_command import run_tune

    request = TuneRequest(
        model=model,
        target=target,
        quantization=quantization,
        activations=activations,
        operator=operator,
        trials=trials,
        minutes=minutes,
        rpc=rpc,
        device_key=device_key,
    )
    run_tune(request, device=device, quiet=quiet or json, as_json=json)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that compile wrote.")],
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Show what is in compiled libraries.

    Size, kernels, registers, shared memory and spills, by each target's own tool where it is
    installed. Exit code 1 if a tool finds something wrong.

    \b
    Example: everycast inspect dist/smollm2-135m-gguf
    """
    from .inspect_command import run_inspect

    if not run_inspect(folder, json):
        raise typer.Exit(1)


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine and what is installed.

    Exit code 1 if something that is needed is wrong.

    \b
    Example: everycast doctor
    """
    from dataclasses import asdict

    from .doctor import run_checks

    checks = run_checks()
    is_fine = all(check.status != "fail" for check in checks)
    if json:
        console.print_json({"ok": is_fine, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            print(f"{check.status:4}  {check.name:20}  {check.detail}")
        console.note("next: everycast chat smollm2-135m" if is_fine else "fix what fails first")
    if not is_fine:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
