"""``multiworld partition``: measures the parts of a model and proposes a cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import CONTEXT, JSON, SPEC, new_table, print_table
from multiworld.serve.controller.dtypes import resolved_here
from multiworld.serve.controller.service import measured_machine_of
from multiworld.serve.engine.compute.stage_meter import TextMeter
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.engine.models.meter import BatchMeter, Meter, measured_stages
from multiworld.serve.engine.models.partition import Part, cut
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Model
from multiworld.serve.text.limits import limits_by


def chosen_model(path: Path, name: str | None) -> tuple[str, ModelSpec]:
    """Return a model of a spec, with the dtype that fits this machine."""
    app = load_spec(path)
    chosen = name or next(iter(app.models))
    if chosen not in app.models:
        known = ", ".join(app.models)
        raise click.ClickException(f"no model {chosen!r} in {path}; there are: {known}")
    machine = measured_machine_of(app)
    return chosen, resolved_here(chosen, app.models[chosen], machine)


def meter_of(
    spec: ModelSpec, model: Model, batches: list[int], context: int, repeats: int
) -> Meter:
    """Return the meter for a model; `batches` are numbers of rows or of sequences."""
    device = spec.stages[0].device
    if spec.generation is None:
        return BatchMeter(model, batches, repeats, device)
    is_deterministic = spec.generation.deterministic
    return TextMeter(
        model, batches, context, repeats, device, is_deterministic=is_deterministic
    )


def _measured(spec: ModelSpec, rows: int, context: int, repeats: int) -> dict[str, Any]:
    model = build_model(spec)

    def parts_of(whole: Model) -> list[dict[str, Any]]:
        meter = meter_of(spec, whole, [rows], context, repeats)
        return [
            {
                "name": part.name,
                "seconds": part.seconds[rows],
                "parameter_bytes": part.weight_bytes,
                "output_bytes": part.out_bytes * rows,
                "kv_bytes": part.kv_bytes,
            }
            for part in measured_stages(meter, len(whole.stages))
        ]

    stages = parts_of(model)
    loads = [
        p["seconds"] / max(1, s.initial_count)
        for p, s in zip(stages, spec.stages, strict=True)
    ]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    measured: dict[str, Any] = {
        "stages": stages,
        "replicas": [stage.initial_count for stage in spec.stages],
        "bottleneck": slowest,
        "rows_per_s": rows / loads[slowest],
    }
    if model.parts is not None:
        parts = parts_of(model.parts())
        costs = [Part(part["seconds"], part["kv_bytes"]) for part in parts]
        proposed = cut(costs, len(spec.stages))
        measured["parts"] = parts
        measured["cut"] = list(proposed.begins[1:])
        measured["cut_seconds"] = list(proposed.seconds)
        measured["cut_bottleneck"] = proposed.bottleneck
    return measured


def _table(
    title: str, parts: list[dict[str, Any]], notes: list[str], *, is_text: bool
) -> Table:
    table = new_table(title, "part")
    columns = ["milliseconds", "weights", "to the next"]
    columns += ["KV a token"] * is_text
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("")
    for part, note in zip(parts, notes, strict=True):
        kib = [f"{part['output_bytes'] / 1024:.1f} KiB"]
        kib += [f"{part['kv_bytes'] / 1024:.1f} KiB"] * is_text
        table.add_row(
            escape(part["name"]),
            f"{part['seconds'] * 1000:.3f}",
            f"{part['parameter_bytes'] / 2**20:.1f} MiB",
            *kib,
            note,
        )
    return table


def _show(name: str, rows: int, spec: ModelSpec, found: dict[str, Any]) -> None:
    console = Console()
    is_text = spec.generation is not None
    unit = "text" if is_text else "row"
    notes = [f"{count} replica(s)" for count in found["replicas"]]
    notes[found["bottleneck"]] += ", the bottleneck"
    title = f"{name}: its stages, {rows} {unit}(s)"
    print_table(_table(title, found["stages"], notes, is_text=is_text))
    console.print(
        f"at most {found['rows_per_s']:.0f} {'token' if is_text else 'row'}s a second, "
        "if every replica has a core of its own"
    )
    if "parts" not in found:
        return
    parts, begins = found["parts"], [0, *found["cut"]]
    marks = ["first of a stage" if n in begins else "" for n in range(len(parts))]
    print_table(_table(f"{name}: its parts", parts, marks, is_text=is_text))
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in found["cut_seconds"])
    console.print(
        f"proposed: cut: {found['cut']}: {times} ms, the bottleneck is "
        f"stage {found['cut_bottleneck']}"
    )
    if spec.generation is not None:
        ends = [*begins[1:], len(parts)]
        kept = max(
            sum(part["kv_bytes"] for part in parts[begin:end])
            for begin, end in zip(begins, ends, strict=True)
        )
        limits = limits_by(spec.generation, kept, len(begins))
        console.print(
            f"each stage then keeps {kept / 1024:.1f} KiB or less for a token, so that "
            f"kv_cache_memory_mb: {spec.generation.kv_cache_memory_mb:g} has room for "
            f"{limits.blocks * limits.block_size:,} tokens"
        )


@click.command()
@SPEC
@click.option("--model", help="Model of the spec; by default the first.")
@click.option(
    "--rows",
    type=click.IntRange(1, 4096),
    default=1,
    help="Rows of a batch; sequences of a step, if the model generates text.",
)
@CONTEXT
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=20,
    help="Number of measurements of each part.",
)
@JSON
def partition(
    spec: Path, model: str | None, rows: int, context: int, repeats: int, as_json: bool
) -> None:
    """Measure each part of a model, and propose where to cut it.

    Loads the model in this process, one stage at a time.
    """
    name, chosen = chosen_model(spec, model)
    torch.set_num_threads(chosen.stages[0].threads)
    found = _measured(chosen, rows, context, repeats)
    if as_json:
        click.echo(json.dumps({"model": name, "rows": rows, **found}, indent=2))
    else:
        _show(name, rows, chosen, found)
