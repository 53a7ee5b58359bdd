"""Factories: functions of modules that a service has imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from multiworld.errors import SpecError
from multiworld.serve.engine.models import imported_sources
from multiworld.serve.engine.models.factory import build_model, import_factory
from multiworld.serve.spec.schema import ModelSpec, StageSpec


@pytest.mark.parametrize("changed", ["shop_of_tests.py", "parts_of_tests.py"])
def test_code_that_has_changed_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """New replicas would run the old code, which is already imported."""
    (tmp_path / "shop_of_tests.py").write_text(
        "from parts_of_tests import RATE\ndef model(): pass\n"
    )
    (tmp_path / "parts_of_tests.py").write_text("RATE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = "shop_of_tests:model"
    try:
        import_factory(factory)
        imported_sources.check(factory)
        (tmp_path / "unrelated.txt").write_text("new")
        imported_sources.check(factory)
        os.utime(tmp_path / changed, (1, 1))
        imported_sources.check(factory)
        with (tmp_path / changed).open("a") as file:
            file.write("# more\n")
        with pytest.raises(SpecError, match=f"{changed} has changed"):
            imported_sources.check(factory)
    finally:
        for name in ("shop_of_tests", "parts_of_tests"):
            sys.modules.pop(name, None)


def fails() -> None:
    raise KeyError("weights")


def test_factory_that_fails_is_named() -> None:
    """A user's factory may raise anything."""
    spec = ModelSpec(factory=f"{__name__}:fails", stages=[StageSpec()])
    with pytest.raises(SpecError, match=r"failed with \{\}: KeyError: 'weights'"):
        build_model(spec)


def test_models_without_code_of_their_own_are_not_looked_at() -> None:
    """Their factory is part of the package."""
    imported_sources.check("")
    imported_sources.check("never_imported:f")
