"""``multiworld bench``: runs suites, shows and keeps what they found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from multiworld.bench import presentation
from multiworld.bench.members import Options
from multiworld.bench.rivals.environment import default_folder, install
from multiworld.bench.runner import SUITES, run_suite, usual
from multiworld.bench.samples import BenchReport
from multiworld.testing.hosts import HostError


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line asks for; see there."""

    rounds: int
    out: Path | None
    apart: tuple[str, ...]
    environments: Path | None
    is_quick: bool = False
    as_json: bool = False

    def options(self) -> Options:
        """Install what takes part from elsewhere.

        Raises:
            ClickException: It cannot be installed.
        """
        folder = self.environments or default_folder()
        for name in self.apart:
            try:
                install(name, folder, lambda text: click.echo(text, err=True))
            except RuntimeError as error:
                raise click.ClickException(str(error)) from error
        return Options(
            self.rounds,
            self.is_quick,
            apart=self.apart,
            environments=str(folder.absolute()),
        )


def run(names: tuple[str, ...], wish: BenchOptions) -> int:
    """Run suites, all of them if none is named; return 1 if one could not be run."""
    out, as_json = wish.out, wish.as_json
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise click.ClickException(
            f"no suite {unknown[0]!r}; there are: {', '.join(SUITES)}"
        )
    options = wish.options()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    console, found, failed = Console(), [], 0
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        for name in names or usual():
            bar = progress.add_task(f"{name}: starting", total=1.0)
            try:
                report = run_suite(
                    name,
                    options,
                    lambda done, text, bar=bar, name=name: progress.update(  # type: ignore[misc]
                        bar, completed=done, description=f"{name}: {text}"
                    ),
                )
            except (HostError, RuntimeError) as error:
                progress.console.print(f"{name}: {error}")
                failed = 1
                continue
            found.append(presentation.to_json(report))
            if not as_json:
                for table in presentation.tables(report):
                    console.print(table)
            if out is not None:
                _keep(out, name, found[-1])
                _draw(report, out, console)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    return failed


def _keep(out: Path, name: str, found: object) -> None:
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _draw(report: BenchReport, out: Path, console: Console) -> None:
    try:
        for path in presentation.draw(report, out):
            console.print(f"drawn: {path}")
    except ModuleNotFoundError:
        console.print("no pictures: pip install matplotlib")
