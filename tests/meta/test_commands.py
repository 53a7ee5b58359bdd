"""The list of commands in ``--help``, and the modules of the command line."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from multiworld.cli.main import COMMANDS, cli
from tests.meta.imports import SOURCE

ROOT = Path(__file__).parents[2]

SHARED = {"__init__", "ending", "main", "model_spec", "options", "post_setup"}
"""Modules of ``multiworld.cli`` that are no command of ``multiworld``."""


def test_every_module_is_a_command() -> None:
    modules = {path.stem for path in (SOURCE / "cli").glob("*.py")}
    assert modules - SHARED == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_function(name: str) -> None:
    module = importlib.import_module(f"multiworld.cli.{name}")
    command = getattr(module, name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert cli.get_command(click.Context(cli), name) is command


def named() -> Iterator[tuple[str, ...]]:
    """Yield the first words of the commands in code, messages and docs."""
    paths = [*SOURCE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in paths:
        text = re.sub(r'"\s+f?"', "", path.read_text())  # joined string literals
        for found in re.finditer(r"`multiworld ([a-z]+)(?: ([a-z]+))?", text):
            yield tuple(word for word in found.groups() if word)


def test_every_command_that_is_named_exists() -> None:
    wrong = set()
    for words in named():
        command = cli.get_command(click.Context(cli), words[0])
        group = command if isinstance(command, click.Group) else None
        is_known = command is not None and (
            group is None or len(words) < 2 or words[1] in group.commands
        )
        if not is_known:
            wrong.add(words)
    assert wrong == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_list_say_the_same(name: str) -> None:
    """The two summaries open with the same verb."""
    command = getattr(importlib.import_module(f"multiworld.cli.{name}"), name)
    summary = inspect.cleandoc(command.help or "").splitlines()[0]
    assert summary.endswith(".")
    assert summary.split()[0] == COMMANDS[name].split()[0]
