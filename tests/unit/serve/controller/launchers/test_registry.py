"""Launchers by name or by import path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import SpecError
from multiworld.serve.controller.launchers.base import LauncherContext
from multiworld.serve.controller.launchers.local import LocalLauncher
from multiworld.serve.controller.launchers.registry import (
    LAUNCHERS,
    maker_of,
)
from multiworld.serve.machines.amounts import Node
from tests.unit.serve.controller.launchers.contexts import context


async def make(context: LauncherContext) -> Any:
    return context.app.app


NOT_A_FUNCTION = 5


@pytest.mark.parametrize("name", [*LAUNCHERS, f"{__name__}:make"])
def test_known_launchers_and_import_paths_are_accepted(name: str) -> None:
    maker_of(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slurm", "no launcher 'slurm'; use local, ray or"),
        ("", "no launcher ''"),
        ("no.such.module:make", "cannot be imported"),
        (f"{__name__}:missing", "cannot be imported"),
        (f"{__name__}:NOT_A_FUNCTION", "is not a function"),
    ],
)
def test_unknown_launcher_is_named_with_those_there_are(name: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        maker_of(name)


async def test_launcher_is_made_from_the_context(tmp_path: Path) -> None:
    made: object = await maker_of(f"{__name__}:make")(
        context(f"{__name__}:make", tmp_path)
    )
    assert made == "mine"
    local = await maker_of("local")(context("local", tmp_path))
    assert isinstance(local, LocalLauncher)
    assert local.nodes() == (Node("here", 2.0, 10),)
    assert local.trouble() == ""
    local.settle()
    await local.close()
    with pytest.raises(SpecError):
        maker_of("slurm")
