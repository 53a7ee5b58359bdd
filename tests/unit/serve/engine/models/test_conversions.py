"""Checkpoint conversions, which transformers builds once in a process."""

from __future__ import annotations

import importlib

import pytest

conversion_mapping = pytest.importorskip("transformers.conversion_mapping")


def test_conversions_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked after the import must not build them again."""

    def fail() -> None:
        raise AssertionError("built again")

    importlib.import_module("multiworld.serve.engine.models.conversions")
    builder = "_build_checkpoint_conversion_mapping"
    monkeypatch.setattr(conversion_mapping, builder, fail)
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
