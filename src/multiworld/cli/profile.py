"""``multiworld profile``: what the stages of a model need, measured."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from multiworld.cli.options import JSON, SPEC
from multiworld.cli.partition import chosen_model
from multiworld.serve.models.factory import build_model
from multiworld.serve.models.profiler import profile_model
from multiworld.serve.resources.amounts import mib
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.profiles import ModelProfile


def run(
    path: Path,
    name: str | None,
    batches: list[int],
    repeats: int,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Measure a model of a spec, print what came of it, and keep it."""
    name, spec = chosen_model(load_spec(path), name, path)
    model = build_model(spec)
    found = profile_model(name, spec, model, batches, repeats, spec.stages[0].device)
    if out is not None:
        try:
            out.write_text(found.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise click.ClickException(
                f"cannot write {out}: {error.strerror}"
            ) from error
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        return 0
    console = Console()
    console.print(_table(found))
    console.print(
        "ms (n): of a batch of n rows. peak: beside the "
        f"{mib(found.base_bytes)} of a process without any stage. memory_mb: what to "
        "book, a quarter more"
    )
    if out is not None:
        console.print(
            f"written to {out}; with `profile: {out}` in the model, its stages book "
            "that much memory and are planned by these times"
        )
    return 0


def _table(found: ModelProfile) -> Table:
    table = Table(title=f"{found.model} {found.version} on {found.device}")
    table.add_column("stage")
    sizes = list(found.stages[0].seconds)
    for rows in sizes:
        table.add_column(f"ms ({rows})", justify="right")
    for column in ("weights", "peak", "out a row", "memory_mb"):
        table.add_column(column, justify="right")
    for k, stage in enumerate(found.stages):
        table.add_row(
            stage.name,
            *(f"{stage.seconds[rows] * 1000:.2f}" for rows in sizes),
            mib(stage.weight_bytes),
            mib(stage.peak_bytes),
            f"{stage.out_bytes / 1024:.1f} KiB",
            f"{found.memory_mb(k):g}",
        )
    return table


@click.command()
@SPEC
@click.option("--model", help="Which of the spec's models; the first by default.")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="Rows of a batch; may be given several times.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to keep it, for `profile:` in the spec.",
)
@JSON
def profile(
    spec: Path,
    model: str | None,
    batches: tuple[int, ...],
    repeats: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure what the stages of a model need: time, memory, bytes per hop.

    Loads the model in this process, one stage at a time.
    """
    sizes = sorted(set(batches))
    sys.exit(run(spec, model, sizes, repeats, out, as_json=as_json))
