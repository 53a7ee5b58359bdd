"""Short soak of a service for every run; ``make soak-serve`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.soak import soak


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "minutes"), [(1, 0.2), (2, 3.0)])
def test_nothing_is_lost_under_random_faults(
    tmp_path: Path, seed: int, minutes: float
) -> None:
    """Random faults lose nothing, make no answer wrong and leak nothing."""
    outcome = soak(tmp_path, seed, minutes)
    assert outcome.is_good, outcome
    assert sum(outcome.faults.values()) >= 5 * minutes
    assert outcome.answered > 500 * minutes
