"""Short soak of a service for every run; ``make soak-serve`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.soak import soak
from tests.serve.soak_generate import soak as soak_generate


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "minutes"), [(1, 0.2), (2, 3.0)])
def test_nothing_is_lost_under_random_faults(
    tmp_path: Path, seed: int, minutes: float
) -> None:
    outcome = soak(tmp_path, seed, minutes)
    assert outcome.is_good, outcome
    assert sum(outcome.faults.values()) >= 5 * minutes
    assert outcome.answered > 500 * minutes


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "minutes", "threads"), [(1, 0.2, 1), (2, 3.0, 4)])
def test_no_stream_is_cut_under_random_faults(
    tmp_path: Path, seed: int, minutes: float, threads: int
) -> None:
    outcome = soak_generate(tmp_path, seed, minutes, threads)
    assert outcome.is_good, outcome
    assert sum(outcome.faults.values()) >= 5 * minutes
    assert outcome.streams > 50 * minutes


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_no_stream_of_an_engine_is_cut_under_random_faults(tmp_path: Path) -> None:
    """The processes of the engine are killed and stopped as well."""
    outcome = soak_generate(tmp_path, 3, 2.0, 1, "stand-in")
    assert outcome.is_good, outcome
    assert outcome.streams > 100
