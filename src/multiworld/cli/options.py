"""Options, tables and requests shared by several commands."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from multiworld.serve.controller.answers import Answer, plain
from multiworld.serve.controller.client import Service

PICTURES = ".png", ".svg", ".pdf"  # formats in which plots can be drawn
WORD_WIDTH = 14  # maximum characters of a word that is never folded

SPEC = click.argument("spec", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
CONTEXT = click.option(
    "--context",
    type=click.IntRange(1, 2**20),
    default=256,
    help="Context length of each sequence, in tokens, if the model generates text.",
)
STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the service; by default ~/.local/state/multiworld/APP, or "
    "MULTIWORLD_STATE/APP.",
)

APP = click.option(
    "--app", help="Name of the service; needed only if several services run."
)


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


class Age(click.ParamType[float]):
    """A length of time, such as 90s, 5m, 2h or 1d, in seconds."""

    name = "age"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        found = AGE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a length of time; give 90s, 5m, 2h or 1d")
        return float(found[1]) * UNITS[found[2]]


def of_service(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a running service and ``--json``; pass the ``Service``."""

    @functools.wraps(command)
    def run(app: str | None, state: Path | None, **options: Any) -> None:
        command(Service(app, state), **options)

    return STATE(APP(JSON(run)))


def finite(data: Any) -> Any:
    """Return plain data with None for NaN and infinity, which JSON lacks."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_json(answer: Answer) -> None:
    click.echo(json.dumps(plain(answer), indent=2))


def local_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def show(data: object, *, as_json: bool, text: str) -> None:
    click.echo(json.dumps(data, indent=2) if as_json else text)


def new_table(title: str, *names: str) -> Table:
    """Return an empty table; the columns `names` are never truncated or folded."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.padding = (0, 1, 0, 0)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or wider rather than cut a value."""
    console = Console()
    if table.title is not None:  # print it apart, because a narrow table would fold it
        console.print(table.title, style="italic", soft_wrap=True)
        table.title = None
    widths, min_widths = [], []
    for column in table.columns:
        column.overflow = "fold"
        cells = [
            console.render_str(str(c)).plain for c in (column.header, *column.cells)
        ]
        widths.append(max(map(cell_len, "\n".join(cells).split("\n"))))
        longest_word = max(map(cell_len, " ".join(cells).split()), default=0)
        if column.no_wrap:
            min_widths.append(widths[-1])
        else:
            min_widths.append(min(longest_word, WORD_WIDTH))
    # Each column takes a space and a divider, too.
    total = sum(widths) + 2 * len(widths)
    # Do not fold in a file or a pipe: other programs read it line by line.
    while console.is_terminal and total > console.width:
        slack = [(w, n) for n, w in enumerate(widths) if w > min_widths[n]]
        if not slack:
            break
        widths[max(slack)[1]] -= 1
        total -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    Console(width=max(console.width, total)).print(table)


def check_writable(option: str, path: Path, suffixes: Collection[str] = ()) -> None:
    """Refuse an unwritable file early, before the command runs for minutes."""
    where = path if path.exists() else path.parent
    is_right = not suffixes or path.suffix.lower() in suffixes
    if is_right and not path.is_dir() and os.access(where, os.W_OK):
        return
    named = f"a name that ends in one of {', '.join(suffixes)}, in" if suffixes else ""
    raise click.ClickException(
        f"{option} {path} cannot be written; give {named or 'a file in'} a folder that "
        "can be written to"
    )


class FiniteRange(click.FloatRange):
    """A number within a range, neither NaN nor infinite."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found
