"""A short soak, every time; longer ones by ``make soak-serve``."""

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
    """Nor wrong, nor leaked."""
    outcome = soak(tmp_path, seed, minutes)
    assert outcome.is_good, outcome
    assert sum(outcome.faults.values()) >= 5 * minutes
    assert outcome.answered > 500 * minutes
