"""``multiworld partition``: measures the parts of a model, proposes a cut. Shell."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from multiworld.cli.options import JSON, SPEC, new_table, print_table
from multiworld.serve.models.factory import build_model
from multiworld.serve.models.partition import PartProfile, cut, profile
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.schema import AppSpec, ModelSpec


def run(path: Path, name: str | None, rows: int, repeats: int, *, as_json: bool) -> int:
    """Measure a model of a spec, and print the result."""
    chosen, spec = chosen_model(load_spec(path), name, path)
    torch.set_num_threads(spec.stages[0].threads)
    found = _measured(spec, rows, repeats)
    if as_json:
        click.echo(json.dumps({"model": chosen, "rows": rows, **found}, indent=2))
    else:
        _show(chosen, rows, found)
    return 0


def chosen_model(app: AppSpec, name: str | None, path: Path) -> tuple[str, ModelSpec]:
    """Return the model of that name, or the first.

    Args:
        app: The spec.
        name: Name of the model; None for the first.
        path: File of the spec, for the error.

    Raises:
        ClickException: The spec has no model of that name.
    """
    chosen = name or next(iter(app.models))
    if chosen not in app.models:
        known = ", ".join(app.models)
        raise click.ClickException(f"no model {chosen!r} in {path}; there are: {known}")
    return chosen, app.models[chosen]


def _measured(spec: ModelSpec, rows: int, repeats: int) -> dict[str, Any]:
    model = build_model(spec)
    stages = profile(model, rows=rows, repeats=repeats)
    loads = [
        p.seconds / s.initial_count for p, s in zip(stages, spec.stages, strict=True)
    ]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    found: dict[str, Any] = {
        "stages": [asdict(part) for part in stages],
        "replicas": [stage.initial_count for stage in spec.stages],
        "bottleneck": slowest,
        "rows_per_s": rows / loads[slowest],
    }
    if model.parts is not None:
        parts = profile(model.parts(), rows=rows, repeats=repeats)
        proposed = cut(parts, len(spec.stages))
        found["parts"] = [asdict(part) for part in parts]
        found["cut"] = list(proposed.begins[1:])
        found["cut_seconds"] = list(proposed.seconds)
        found["cut_bottleneck"] = proposed.bottleneck
    return found


def _table(title: str, parts: list[dict[str, Any]], more: list[str]) -> Table:
    table = new_table(title, "part")
    for column in ("milliseconds", "weights", "to the next"):
        table.add_column(column, justify="right")
    table.add_column("")
    for values, note in zip(parts, more, strict=True):
        part = PartProfile(**values)
        table.add_row(
            part.name,
            f"{part.seconds * 1000:.3f}",
            f"{part.parameter_bytes / 2**20:.1f} MiB",
            f"{part.output_bytes / 1024:.1f} KiB",
            note,
        )
    return table


def _show(name: str, rows: int, found: dict[str, Any]) -> None:
    console = Console()
    notes = [f"{count} replica(s)" for count in found["replicas"]]
    notes[found["bottleneck"]] += ", the bottleneck"
    print_table(_table(f"{name}: its stages, {rows} row(s)", found["stages"], notes))
    console.print(
        f"at most {found['rows_per_s']:.0f} rows a second, if every replica has a core "
        "of its own"
    )
    if "parts" not in found:
        return
    begins = {0, *found["cut"]}
    marks = [
        "first of a stage" if n in begins else "" for n in range(len(found["parts"]))
    ]
    print_table(_table(f"{name}: its parts", found["parts"], marks))
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in found["cut_seconds"])
    console.print(
        f"proposed: cut: {found['cut']}: {times} ms, the bottleneck is "
        f"stage {found['cut_bottleneck']}"
    )


@click.command()
@SPEC
@click.option("--model", help="Model of the spec; by default the first.")
@click.option(
    "--rows",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Rows of a batch.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Measurements of each part.",
)
@JSON
def partition(
    spec: Path, model: str | None, rows: int, repeats: int, as_json: bool
) -> None:
    """Measure each part of a model, and propose where to cut it.

    Loads the model in this process, one stage at a time.
    """
    sys.exit(run(spec, model, rows, repeats, as_json=as_json))
