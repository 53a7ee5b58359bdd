"""``multiworld profile``: measures time and memory of the stages of a model."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import (
    CONTEXT,
    JSON,
    SPEC,
    check_writable,
    new_table,
    print_table,
)
from multiworld.cli.partition import chosen_model, meter_of
from multiworld.serve.engine.compute.stage_meter import TextMeter
from multiworld.serve.engine.models.factory import build_model, modules_of
from multiworld.serve.engine.models.meter import Meter
from multiworld.serve.engine.models.profiler import profile_model
from multiworld.serve.machines.amounts import mib
from multiworld.serve.spec.profiles import ModelProfile


def _batch(meter: Meter) -> str:
    """Return a description of the work that a column measures."""
    if not isinstance(meter, TextMeter):
        return "a batch of n rows"
    return (
        f"a step of n sequences of {meter.context} tokens each. ms ({meter.context}): "
        "time of a prompt of that length. Memory for KV blocks is booked in addition"
    )


def _table(found: ModelProfile) -> Table:
    title = f"{found.model} {found.version} on {found.device}"
    table = new_table(title, "stage")
    sizes = list(found.stages[0].seconds)
    for rows in sizes:
        table.add_column(f"ms ({rows})", justify="right")
    is_text = any(stage.kv_bytes for stage in found.stages)
    columns = ["weights", "peak", "out a row", "memory_mb"]
    columns += ["KV a token"] * is_text
    for column in columns:
        table.add_column(column, justify="right")
    for k, stage in enumerate(found.stages):
        table.add_row(
            escape(stage.name),
            *(f"{stage.seconds[rows] * 1000:.2f}" for rows in sizes),
            mib(stage.weight_bytes),
            mib(stage.peak_bytes),
            f"{stage.out_bytes / 1024:.1f} KiB",
            f"{found.memory_mb(k):g}",
            *[f"{stage.kv_bytes / 1024:.1f} KiB"] * is_text,
        )
    return table


@click.command()
@SPEC
@click.option("--model", help="Model of the spec; by default the first.")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 4, 16),
    help="Rows of a batch, or sequences of a step; may be repeated.",
)
@CONTEXT
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=10,
    help="Number of measurements of each batch.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, for `profile:` in the spec.",
)
@JSON
def profile(
    spec: Path,
    model: str | None,
    batches: tuple[int, ...],
    context: int,
    repeats: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the time and memory that the stages of a model need.

    Loads the model in this process, one stage at a time.
    """
    if out is not None:
        check_writable("--out", out)
    name, resolved = chosen_model(spec, model)
    built = build_model(resolved)
    for module in modules_of(resolved, built):
        # Import them in advance, as the fork server does.
        importlib.import_module(module)
    meter = meter_of(resolved, built, sorted(set(batches)), context, repeats)
    found = profile_model(name, resolved, meter)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        _keep(found, out)
        return
    print_table(_table(found))
    console = Console()
    console.print(
        f"ms (n): time of {_batch(meter)}. peak: memory beyond the "
        f"{mib(found.base_bytes)} of a process without a stage. memory_mb: memory to "
        f"book: peak plus {mib(found.base_bytes)}, and 25 % of that sum in addition"
    )
    if any(size < 0 for each in built.inputs for size in each.shape[1:]):
        console.print(
            "memory was measured with the model's example; longer inputs need more. "
            "Raise memory_mb for them, because a replica that exceeds it is killed",
            markup=False,
        )
    _keep(found, out)
    if out is not None:
        # Specs name files relative to their folder.
        named = os.path.relpath(out, spec.parent)
        console.print(
            f"written to {out}; with `profile: {named}` in the model, its stages book "
            "this memory, and scaling and placement use these times",
            markup=False,
        )


def _keep(found: ModelProfile, out: Path | None) -> None:
    if out is None:
        return
    try:
        out.write_text(found.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from error
