"""Model factories that hang, exit or raise at a gateway."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from multiworld.serve.gateway import model_builds
from multiworld.serve.gateway.model_builds import ModelBuilds
from multiworld.serve.spec.schema import ModelSpec
from tests.unit.serve.edges import HANG_S

SPEC = ModelSpec.model_validate({"factory": "a:b", "stages": [{}]})


async def test_factory_that_hangs_or_exits_costs_its_version_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, names = threading.Event(), list[str]()

    def build(spec: ModelSpec) -> Any:
        if spec.factory == "it:hangs":
            released.wait(HANG_S)
        if spec.factory == "it:exits":
            sys.exit("usage: model.py WEIGHTS")
        return spec

    monkeypatch.setattr(model_builds, "build_model", build)
    monkeypatch.setattr(model_builds, "TURN_S", 0.05)
    builds = ModelBuilds(lambda name, spec, model: names.append(name), lambda: None)
    for name in ("hangs", "exits", "works"):
        spec = SPEC.model_copy(update={"factory": f"it:{name}"})
        builds.begin(name, "1", spec.model_dump_json())
    await builds.wait(HANG_S, ("works", "1"))
    assert names == ["works"]
    assert ("hangs", "1") in builds
    await builds.wait(0.01, ("hangs", "1"))
    released.set()
    await builds.wait(HANG_S, ("hangs", "1"))
    assert names == ["works", "hangs"]
    builds.close()
