"""Contexts of launchers under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multiworld.serve.controller.launchers.base import LauncherContext
from multiworld.serve.machines.amounts import Node
from multiworld.serve.spec.schema import AppSpec


def context(launcher: str, logs: Path, **more: Any) -> LauncherContext:
    models = {"m": {"factory": "x:y", "stages": [{}]}}
    app = AppSpec.model_validate({"app": "mine", "models": models})
    given: dict[str, Any] = {
        "preload": (),
        "env": {},
        "on_exit": lambda name, code: None,
        "on_nodes": lambda: None,
        **more,
    }
    return LauncherContext(
        app=app.model_copy(update={"launcher": launcher}),
        logs=logs,
        node=Node("here", 2.0, 10),
        is_new=True,
        **given,
    )
