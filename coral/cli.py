"""The command line ``coral``, also ``python -m coral``.

A command is one function here that imports its implementation, ``coral/apps/<command>.py``, when it runs: that keeps
the start fast and ``--help`` free of heavy imports. A group such as ``coral isa`` is a ``typer.Typer`` in ``app``.
A ``CoralError`` becomes its sentence on stderr and exit code 1; wrong usage exits with 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from coral import CoralError, __version__

app = typer.Typer(
    name="coral",
    help="tinygrad on the Google Coral USB Accelerator: tools for its programs, files and sticks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
isa_app = typer.Typer(help="The instruction set.", no_args_is_help=True)
app.add_typer(isa_app, name="isa")
firmware_app = typer.Typer(help="The stick's firmware.", invoke_without_command=True)
app.add_typer(firmware_app, name="firmware")

eval_app = typer.Typer(help="How good quantised models are.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
stick_app = typer.Typer(help="Simulated sticks for other programs.", no_args_is_help=True)
app.add_typer(stick_app, name="stick")

InputFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, show_default=False)]
InputPaths = Annotated[list[Path], typer.Argument(exists=True, readable=True, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


StoryDevice = Annotated[
    Literal["usb", "sim", "cpu"] | None, typer.Option(help="A stick, the simulated one, none (default: as DEV says).")
]
Checkpoint = Annotated[
    str | None, typer.Option(help="A llama2.c model: a file, stories15M or another public name, or an address.")
]
Sha256 = Annotated[str, typer.Option(metavar="HEX", help="The checkpoint's sha256; another file is refused.")]
TokenizerFile = Annotated[Path | None, typer.Option(dir_okay=False, help="Its tokenizer.bin.")]
HOST = "What runs operators outside the chip part; auto: tinygrad on large tensors, else NumPy."
ENGINE = "float: on the host. matmul, blocks: products on the chip. chip: a token is one program. bits: that in NumPy."
INPUTS = "One .npy, .npz or image per input, in order; or one .npz."
BREAK = "Stop where the instruction of this sequence number begins, and show counters and units."


def number(text: str) -> int:
    """An integer as in Python, also hexadecimal."""
    return int(text, 0)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"tinycoral {__version__}")


@app.command()
def info(
    file: InputFile,
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option(help="Check a compiled model as Google's runtime does.")] = False,
) -> None:
    """Show what a compiled model, an uncompiled one or a bare program holds. With --strict, exit code 1 if it fails."""
    from coral.apps.info import info, strictly

    if strict:
        if not strictly(file, as_json):
            raise typer.Exit(1)
        return
    info(file, as_json)


@app.command()
def disasm(
    file: InputFile,
    only: Annotated[int | None, typer.Option(min=0, help="Only the bitstream of this number.")] = None,
) -> None:
    """Print the instructions of a *_edgetpu.tflite or *.coral FILE, one per line.

    What is printed for one bitstream is what "coral asm" reads.
    """
    from coral.apps.disasm import disasm

    disasm(file, only)


@app.command()
def asm(
    file: InputFile,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="File to write, for example x.coral.")],
) -> None:
    """Assemble the text of one bitstream, as "coral disasm" prints it."""
    from coral.apps.asm import asm

    asm(file, out)


@firmware_app.callback()
def firmware(context: typer.Context, as_json: AsJson = False) -> None:
    """Show whether the stick's firmware is installed, or install it."""
    from coral.apps.firmware import status

    if context.invoked_subcommand is None:
        status(as_json=as_json)


@firmware_app.command("install")
def firmware_install(
    file: Annotated[Path | None, typer.Argument(exists=True, dir_okay=False, show_default=False)] = None,
    from_libedgetpu: Annotated[bool, typer.Option(help="Take it out of an installed libedgetpu.")] = False,
    download: Annotated[bool, typer.Option(help="Fetch it from libedgetpu's public repository.")] = False,
) -> None:
    """Install the firmware from a FILE, an installed libedgetpu, or by download; its sha256 is checked."""
    from coral.apps.firmware import install

    install(file, from_libedgetpu=from_libedgetpu, download=download)


@app.command()
def devices(as_json: AsJson = False) -> None:
    """List the sticks on USB and the simulated ones."""
    from coral.apps.devices import show

    show(as_json)


@app.command()
def doctor(
    as_json: AsJson = False,
    write_udev: Annotated[str | None, typer.Option(metavar="PATH", help="Only write the udev rule (-: print).")] = None,
) -> None:
    """Check everything that tinycoral needs and say how to repair it.

    Exit code 1 if something is missing that the simulated stick needs, too.
    """
    from coral.apps import doctor

    if write_udev is not None:
        doctor.write_udev(write_udev)
    elif not doctor.doctor(as_json):
        raise typer.Exit(1)


@app.command()
def selftest(
    device: Annotated[Literal["usb", "sim"], typer.Option(help="A real stick or the simulated one.")] = "usb",
    index: Annotated[int, typer.Option(min=0, help="Which stick.")] = 0,
    report: Annotated[Path | None, typer.Option(dir_okay=False, help="File for the report.")] = None,
    as_json: AsJson = False,
    bold: Annotated[bool, typer.Option(help="Also steps that may make a stick hang until it is replugged.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only steps of this name, * allowed; may be repeated.")] = None,
    list_steps: Annotated[bool, typer.Option("--list", help="Name the steps and do nothing.")] = False,
) -> None:
    """Test a stick from harmless to bold, and write a report. Exit code 1 if anything is not as assumed."""
    from coral.apps.selftest import selftest

    if not selftest(device, index, report, as_json, bold, only or [], list_steps):
        raise typer.Exit(1)


@bench_app.command("call")
def bench_call(
    as_json: AsJson = False,
    calls: Annotated[int, typer.Option(min=1, help="Calls per transport.")] = 2000,
    profile: Annotated[bool, typer.Option(help="Show where the time of in-process calls goes.")] = False,
    over_libusb: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure what a call costs on the host, with a chip that answers at once."""
    from coral.apps.bench import call

    call(calls, as_json, profile, over_libusb)


@bench_app.command("fc")
def bench_fc(as_json: AsJson = False) -> None:
    """Predict linear layers and matrix products, beside published times."""
    _predict("fc", as_json)


@bench_app.command("conv")
def bench_conv(as_json: AsJson = False) -> None:
    """Predict convolutions and MobileNet v1, beside published times."""
    _predict("conv", as_json)


@bench_app.command("mnist")
def bench_mnist(as_json: AsJson = False) -> None:
    """Predict tinygrad's beautiful_mnist, 1 to 256 images per call, beside published figures."""
    _predict("mnist", as_json)


@bench_app.command("cifar")
def bench_cifar(as_json: AsJson = False) -> None:
    """Predict tinygrad's beautiful_cifar, 1 to 32 images per call."""
    _predict("cifar", as_json)


def _predict(name: str, as_json: bool) -> None:
    from coral.apps.benchmarks import bench

    bench(name, as_json)


@stick_app.command("serve")
def stick_serve(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", show_default=False)],
    sticks: Annotated[int, typer.Option(min=1, max=16, help="How many.")] = 1,
    speed: Annotated[Literal["super", "high"], typer.Option(help="USB 3 or USB 2.")] = "super",
    running: Annotated[bool, typer.Option(help="Found with their firmware running.")] = False,
    mode: Annotated[Literal["wedge", "lenient"], typer.Option(help="After a mistake of the host.")] = "wedge",
    log: Annotated[bool, typer.Option(help="Print what the sticks noted, at the end.")] = False,
) -> None:
    """Run COMMAND, whose libusb sees simulated sticks (Linux, needs umockdev). Exits with its exit code."""
    from coral.apps.stick_serve import serve

    raise typer.Exit(serve(command, sticks, speed, running, mode, log))


@isa_app.command("check")
def isa_check(paths: InputPaths, as_json: AsJson = False) -> None:
    """Prove that every instruction of the files, or of all programs in the folders, is understood.

    Decodes and re-encodes each instruction through its fields and through its text, looks for bits that nothing names,
    and checks frame, length, sequence numbers and the rules of the instruction set. Exit code 1 if anything fails.
    """
    from coral.apps.isa_check import isa_check

    if not isa_check(paths, as_json):
        raise typer.Exit(1)


@app.command()
def run(
    model: InputFile,
    inputs: Annotated[list[Path] | None, typer.Option("--input", "-i", exists=True, help=INPUTS)] = None,
    outputs: Annotated[
        list[Path] | None, typer.Option("--output", "-o", help="One .npz, or a .npy per output.")
    ] = None,
    random: Annotated[int | None, typer.Option(metavar="SEED", help="Random inputs instead of files.")] = None,
    device: Annotated[Literal["sim", "usb"], typer.Option(help="The simulated stick or a real one.")] = "sim",
    index: Annotated[int, typer.Option(min=0, help="Which stick.")] = 0,
    host: Annotated[Literal["auto", "numpy", "tinygrad", "none"], typer.Option(help=HOST)] = "auto",
    no_host: Annotated[bool, typer.Option("--no-host", help="The same as --host none.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Show so many of the highest outputs.")] = 0,
    labels: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Names of the classes.")] = None,
    stop: Annotated[int | None, typer.Option("--break", metavar="SEQ", parser=number, help=BREAK)] = None,
    dump: Annotated[Path | None, typer.Option(dir_okay=False, help="With --break: memories as .npz.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a compiled MODEL (*_edgetpu.tflite) once, on a stick or without one."""
    if stop is not None:
        from coral.apps.debug import look

        look(model, inputs or [], random, stop, dump)
        return
    from coral.apps.run import run

    run(
        model,
        inputs=inputs or [],
        outputs=outputs or [],
        device=device,
        index=index,
        host=False if no_host or host == "none" else host,
        top=top,
        labels=labels,
        random=random,
        as_json=as_json,
    )


@app.command("compile")
def compile_(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL ...", exists=True, dir_okay=False, readable=True, show_default=False)
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; a folder for several models.")] = None,
    batch: Annotated[int, typer.Option(help="Images per call.")] = 1,
    clock: Annotated[str, typer.Option(help="Clock of the chip: max, std, medium or low.")] = "std",
    report: Annotated[Literal["text", "json", "none"], typer.Option(help="What to print about it.")] = "text",
    picture: Annotated[Path | None, typer.Option(dir_okay=False, help="Placement and timeline to write (PNG).")] = None,
) -> None:
    """Compile quantised TFLite or ONNX MODELs for a stick; several are compiled to stay on the chip together."""
    from coral.apps.compile import compile_files

    compile_files(models, out, batch=batch, clock=clock, report=report, picture=picture)


@app.command()
def verify(
    original: InputFile,
    compiled: InputFile,
    n: Annotated[int, typer.Option("--n", min=0, help="Random inputs.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    images: Annotated[list[Path] | None, typer.Option("--image", exists=True, help="Also these images.")] = None,
    orders: Annotated[int, typer.Option(min=0, help="Also runs with the chip's units in random order.")] = 0,
    device: Annotated[
        Literal["sim", "usb", "direct"], typer.Option(help="Simulated stick, real one, or the simulated chip alone.")
    ] = "sim",
    as_json: AsJson = False,
) -> None:
    """Compare a COMPILED model with the ORIGINAL graph, computed layer by layer in the chip's arithmetic.

    Exit code 1 if any value differs.
    """
    from coral.apps.verify import verify

    if not verify(
        original, compiled, n=n, seed=seed, images=images or [], orders=orders, device=device, as_json=as_json
    ):
        raise typer.Exit(1)


@app.command()
def trace(
    model: InputFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", dir_okay=False, help="Trace to write (JSON).")] = None,
    picture: Annotated[Path | None, typer.Option(dir_okay=False, help="Picture to write (PNG).")] = None,
    inputs: Annotated[list[Path] | None, typer.Option("--input", "-i", exists=True, help=INPUTS)] = None,
    random: Annotated[int | None, typer.Option(metavar="SEED", help="Random inputs (default: seed 0).")] = None,
    clock: Annotated[str, typer.Option(help="Clock of the chip: max, std, medium or low.")] = "std",
) -> None:
    """Show when every unit does what in one call of a compiled MODEL; all times are predicted.

    The trace opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
    """
    from coral.apps.trace import trace

    trace(model, out, picture, inputs=inputs or [], random=random, clock=clock)


@eval_app.command("stories")
def eval_stories(
    engines: Annotated[list[str] | None, typer.Option("--engine", help=ENGINE)] = None,
    device: StoryDevice = None,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerFile = None,
    sha256: Sha256 = "",
    stories: Annotated[int, typer.Option(min=1, help="How many the float model writes.")] = 16,
    length: Annotated[int, typer.Option(min=3, help="Their length at most, in words.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Perplexity and agreement with the float model, on text that it wrote."""
    from coral.apps.stories.evaluate import evaluate

    evaluate(
        engines or ["float", "matmul"],
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        sha256=sha256,
        device=device,
        stories=stories,
        length=length,
        as_json=as_json,
    )


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8642,
    engine: Annotated[str, typer.Option(help=ENGINE)] = "matmul",
    device: StoryDevice = None,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerFile = None,
    sha256: Sha256 = "",
    warm: Annotated[list[int] | None, typer.Option(min=1, max=256, help="Compile this many stories at once.")] = None,
) -> None:
    """Serve a language model: a page to write stories with it, and OpenAI's interface."""
    from coral.apps.stories.serve import serve

    serve(
        host=host,
        port=port,
        engine=engine,
        device=device,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        sha256=sha256,
        warm=tuple(warm or [1]),
    )


def main() -> None:
    """Run the command line; the process ends here."""
    try:
        app()
    except (CoralError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail as well
        else:
            print(f"coral: {error}", file=sys.stderr)
        sys.exit(1)
