"""How threads wait: ours, the user's choice, and what engines of others get."""

from __future__ import annotations

import pytest

from multiworld.serve.machines.openmp import SPINS, others, waits


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {}),
        ({"OMP_WAIT_POLICY": "active"}, {}),
    ],
)
def test_users_choice_is_kept(environ: dict[str, str], wanted: dict[str, str]) -> None:
    assert waits(environ) == wanted


def test_engines_wait_as_their_makers_have_chosen() -> None:
    assert others({"A": "b", **waits({})}) == {"A": "b"}
    assert others({"GOMP_SPINCOUNT": "7"}) == {"GOMP_SPINCOUNT": "7"}
