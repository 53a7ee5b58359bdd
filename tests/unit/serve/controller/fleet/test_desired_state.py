"""Numbers of replicas from the spec, the recorded state and manual scaling."""

from __future__ import annotations

from typing import Any

import pytest

from multiworld.serve.controller.fleet.desired_state import Sizes, desired_state_of
from multiworld.serve.spec.schema import AppSpec


def app(**stage: Any) -> AppSpec:
    model = {"factory": "a:b", "stages": [stage]}
    return AppSpec.model_validate({"models": {"m": model}})


def test_size_of_a_version_that_was_rolled_back_counts_no_more() -> None:
    """A new spec that asks for 4 again gets 4, not the 2 that run."""
    running = Sizes([2], app(replicas=2).models["m"])
    found = desired_state_of(app(replicas=4), {"m": running})
    assert found.models["m"].replicas == (4,)


RANGE = {"min_replicas": 1, "max_replicas": 4}


@pytest.mark.parametrize(
    ("old", "new", "recorded", "wanted"),
    [
        ({"replicas": 2}, {"replicas": 2}, 3, 3),  # scaled by hand
        ({"replicas": 2}, {"replicas": 2, "cpus": 1.0}, 1, 1),
        ({"replicas": 2}, {"replicas": 5}, 3, 5),  # the spec has changed
        ({"replicas": RANGE}, {"replicas": 2}, 3, 2),
        ({"replicas": 2}, {"replicas": RANGE}, 7, 4),
        ({"replicas": RANGE}, {"replicas": RANGE}, 3, 3),
    ],
)
def test_stage_keeps_its_size_until_the_spec_gives_another(
    old: dict[str, Any], new: dict[str, Any], recorded: int, wanted: int
) -> None:
    before = Sizes([recorded], app(**old).models["m"])
    found = desired_state_of(app(**new), {"m": before})
    assert found.models["m"].replicas == (wanted,)
