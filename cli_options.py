"""Arguments and options that several commands share, and the words of their help."""

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "A name, a Hugging Face folder, HF://org/name, a GGUF file, or a compiled folder."
SCHEME_HELP = "Such as q4f16_1 or q0f32. Default: a GGUF as it is, a float model in 4 bits."
TARGET_HELP = "cpu, vulkan, cuda, rocm, metal, opencl, webgpu, perhaps :ARCH; or all."
DEVICE_HELP = "auto (the best), cpu, cuda, rocm, metal, vulkan or opencl; cuda:1 is a second one."
TUNED_DEVICE_HELP = "The GPU that kernels are tuned for; default: the first one, as vulkan:0."
ACTIVATIONS_HELP = "Inputs of quantized layers: auto, int8, mixed, int16, float32."
THREADS_HELP = "Threads that compute; default: as many as are fastest here."
CONTEXT_HELP = "Most tokens of prompt and answer together."

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP)]
Target = Annotated[str, typer.Option("--target", help=TARGET_HELP)]
Device = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
Quantization = Annotated[str | None, typer.Option("--quantization", "-q", help=SCHEME_HELP)]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the model's folder goes.")]
Context = Annotated[int | None, typer.Option("--context-window-size", min=1, help=CONTEXT_HELP)]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help=THREADS_HELP)]
Activations = Annotated[str, typer.Option(help=ACTIVATIONS_HELP)]
TunedDevice = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help=TUNED_DEVICE_HELP)
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no memory plan.")]
