"""The commands and their options. What they do is in the other modules, imported when they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ruda
from ruda.cli.console import CliError, stdout, steps
from ruda.cli.entry import Cli
from ruda.testing.files.atomic import check_destination, write_text

app = typer.Typer(
    cls=Cli,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit status: 0 success, 1 a failed verdict, 2 bad input, 3 a fault of the program.",
)

LayerArgument = Annotated[Path, typer.Argument(metavar="LAYER", help="A layer file.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the results.")
]
BackendName = Annotated[str, typer.Option("--backend", metavar="NAME", help="See `ruda backends`.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="Such as cuda:0; the backend's default if not given."),
]
DTypeName = Annotated[
    str | None,
    typer.Option("--dtype", metavar="TYPE", help="Cast the operands first: f64, f32, bf16 or f16."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ruda {ruda.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            is_eager=True,
            callback=_print_version,
            help="Show the version.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", metavar="", help="Show tracebacks; may stand anywhere on the line."
        ),
    ] = False,
) -> None:
    """Routed Mixture-of-Experts layers with explicit gradients, on any array backend."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def backends() -> None:
    """List every known backend, or why it cannot be used and what installs it."""
    from ruda.cli.backends import print_backends

    print_backends(stdout())


@app.command("make-layer")
def make_layer(
    family: Annotated[
        str, typer.Option(metavar="NAME", help="qwen3_moe, mixtral, deepseek_v3 or olmoe.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The layer file to write.")
    ],
    tokens: Annotated[int, typer.Option(min=0, help="Tokens, T.")] = 128,
    scale: Annotated[
        str, typer.Option(metavar="N", help="Factor for both widths: a fraction or a decimal.")
    ] = "1/8",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Storage type.")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds, equal layers.")] = 0,
) -> None:
    """Make a layer file with a model family's geometry and routing rules."""
    from ruda.cli.parity_report import describe_layer
    from ruda.cli.prepare import check_memory, parse_scale
    from ruda.families.table import get_family
    from ruda.testing import family_layer as maker
    from ruda.testing.files.layers import write_layer

    chosen = get_family(family)
    storage = ruda.parse_dtype(dtype)
    fraction = parse_scale(scale)
    needed = maker.layer_bytes(chosen, tokens, fraction, storage)
    check_destination(output)
    check_memory("this layer", needed, "a smaller --scale makes it smaller")
    with steps(chosen.experts + 1) as bar:
        layer = maker.make_layer(
            chosen, tokens=tokens, scale=fraction, dtype=storage, seed=seed, step=bar.step
        )
    metadata = {
        "family": chosen.name,
        "model": chosen.model,
        "scale": str(fraction),
        "seed": str(seed),
        "ruda_version": ruda.__version__,
    }
    write_layer(output, layer, metadata)
    stdout().print(
        f"{output}: {chosen.name}, {describe_layer(layer)}", markup=False, soft_wrap=True
    )


@app.command()
def forward(
    layer: LayerArgument,
    backend: BackendName = "numpy",
    device: Device = None,
    dtype: DTypeName = None,
    output: Output = None,
) -> None:
    """Run a layer's forward pass; writes `output`, `expert_ids` and `weights`."""
    from ruda.cli.prepare import prepare
    from ruda.cli.results import print_tensors, run_metadata
    from ruda.testing.files.tensors import write_tensors
    from ruda.testing.run import run_layer

    chosen, operands = prepare(layer, backend, device, dtype, output)
    with steps(1) as bar, bar.step(f"{chosen.name} on {chosen.device}"):
        run = run_layer(chosen, operands, ruda.MoeGradientSelection.none())
    tensors = {"output": run.output, "expert_ids": run.expert_ids, "weights": run.weights}
    if output is not None:
        write_tensors(output, tensors, run_metadata(chosen, operands, layer))
    title = f"{layer.name} on {chosen.name} {chosen.version} ({chosen.device})"
    print_tensors(stdout(), title, tensors, {"forward": run.forward_seconds})


@app.command()
def backward(
    layer: LayerArgument,
    backend: BackendName = "numpy",
    device: Device = None,
    dtype: DTypeName = None,
    gradients: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Such as input,logits; all five if not given."),
    ] = None,
    output: Output = None,
) -> None:
    """Run a layer forward and backward; writes the wanted ones of the five gradients."""
    from ruda.cli.prepare import prepare
    from ruda.cli.results import parse_gradients, print_tensors, run_metadata
    from ruda.testing.files.tensors import write_tensors
    from ruda.testing.run import run_layer

    wanted = parse_gradients(gradients)
    chosen, operands = prepare(layer, backend, device, dtype, output)
    with steps(1) as bar, bar.step(f"{chosen.name} on {chosen.device}"):
        run = run_layer(chosen, operands, wanted)
    if output is not None:
        write_tensors(output, run.gradients, run_metadata(chosen, operands, layer))
    title = f"{layer.name} on {chosen.name} {chosen.version} ({chosen.device})"
    times = {"forward": run.forward_seconds, "backward": run.backward_seconds}
    print_tensors(stdout(), title, run.gradients, times)


@app.command()
def parity(
    layer: LayerArgument,
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Such as numpy,torch:cuda:0; every one present if not given."
        ),
    ] = None,
    device: Device = None,
    dtype: DTypeName = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the errors and the load (png, svg, pdf)."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report for a program.")
    ] = None,
) -> None:
    """Compare backends with the float64 reference; status 1 if one is out of tolerance."""
    from ruda.cli.parity_report import print_report, report_to_dict
    from ruda.cli.prepare import check_memory, read
    from ruda.testing import parity as compared

    names = None if backends is None else [name.strip() for name in backends.split(",")]
    for destination in (plot, json_file):
        if destination is not None:
            check_destination(destination)
    if plot is not None:
        # Loads matplotlib, so that its absence is known before the work.
        from ruda.cli.parity_plot import plot_format

        plot_format(plot)
    operands = read(layer, dtype)
    check_memory("the reference", compared.reference_bytes(operands), "a smaller layer needs less")
    found, absent = compared.present_backends(names, device)
    with steps(len(found) + 1) as bar:
        report = compared.measure(
            str(layer), operands, found, absent, must_serve=names is not None, step=bar.step
        )
    if json_file is not None:
        write_text(json_file, json.dumps(report_to_dict(report), indent=2, allow_nan=False) + "\n")
    if plot is not None:
        from ruda.cli.parity_plot import write_plot

        write_plot(plot, report)
    print_report(stdout(), report)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def fuzz(
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Such as numpy,torch:cuda:0; every one present if not given."
        ),
    ] = None,
    device: Device = None,
    minutes: Annotated[
        float, typer.Option(metavar="N", help="How long, all backends together.")
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the first round; each has one of its own.")
    ] = 0,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds a backend at most; no limit if not given.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where a failing layer is put.")
    ] = Path(),
) -> None:
    """Try random layers on backends until one is got wrong; status 1 if one is."""
    try:
        from ruda.cli import fuzz as fuzzing
    except ModuleNotFoundError as error:
        raise CliError(f"{error.name} is not installed; pip install 'ruda[test]'") from None
    from ruda.testing.parity import present_backends

    names = None if backends is None else [name.strip() for name in backends.split(",")]
    found, absent = present_backends(names, device)
    for reason in absent.values():
        stdout().print(f"absent: {reason}", markup=False, soft_wrap=True)
    if not found:
        raise CliError("no backend is present to try")
    if not fuzzing.fuzz(stdout(), found, minutes=minutes, seed=seed, rounds=rounds, folder=output):
        raise typer.Exit(1)
