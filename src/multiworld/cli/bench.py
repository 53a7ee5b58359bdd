"""``multiworld bench``: runs suites, shows and keeps what they found."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from multiworld.bench import showing
from multiworld.bench.members import Options
from multiworld.bench.running import SUITES, run_suite
from multiworld.bench.samples import Report
from multiworld.testing.hosts import HostError


def run(
    names: tuple[str, ...],
    rounds: int,
    out: Path | None,
    *,
    is_quick: bool,
    as_json: bool,
) -> int:
    """Run suites, all of them if none is named; return 1 if one could not be run."""
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise click.ClickException(
            f"no suite {unknown[0]!r}; there are: {', '.join(SUITES)}"
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    console, found, failed = Console(), [], 0
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        for name in names or SUITES:
            bar = progress.add_task(f"{name}: starting", total=1.0)
            try:
                report = run_suite(
                    name,
                    Options(rounds, is_quick),
                    lambda done, text, bar=bar, name=name: progress.update(  # type: ignore[misc]
                        bar, completed=done, description=f"{name}: {text}"
                    ),
                )
            except (HostError, RuntimeError) as error:
                progress.console.print(f"{name}: {error}")
                failed = 1
                continue
            found.append(showing.to_json(report))
            if not as_json:
                for table in showing.tables(report):
                    console.print(table)
            if out is not None:
                _keep(out, name, found[-1])
                _draw(report, out, console)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    return failed


def _keep(out: Path, name: str, found: object) -> None:
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _draw(report: Report, out: Path, console: Console) -> None:
    try:
        for path in showing.draw(report, out):
            console.print(f"drawn: {path}")
    except ModuleNotFoundError:
        console.print("no pictures: pip install matplotlib")
