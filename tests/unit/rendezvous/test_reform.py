"""Survivors of a broken incarnation: who continues, whatever the order of claims."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.rendezvous.reform import Reform, ReformClaim
from tests.unit.rendezvous.sessions import sealed_of


def claim(rank: int, *lost: int, size: int = 4) -> ReformClaim:
    """Return the claim of a survivor; each rank has a session of its own."""
    return ReformClaim(
        session=rank + 100,
        request=rank,
        world="w",
        epoch=3,
        rank=rank,
        size=size,
        lost=frozenset(lost),
        terms="",
        uid=f"m{rank}",
        deadline=10.0,
        member=sealed_of(rank),
        deadline_s=10.0,
        fresh_nonce=1,
        place=(0, 1),
    )


def offer(reform: Reform, *claims: ReformClaim) -> list[int]:
    """Make claims in order, as the registry does; return the ranks it refuses."""
    refused = []
    for each in claims:
        if each.rank in reform.lost:
            refused.append(each.rank)
        else:
            reform.claims[each.rank] = each
    return refused


def ranks(reform: Reform) -> list[int]:
    return [each.rank for each in reform.members()]


def test_nobody_has_claimed() -> None:
    """Without a claim nothing is settled, however small the world."""
    reform = Reform(3, 2)
    assert not reform.is_settled
    assert reform.missing() == [0, 1]
    assert Reform(3, 0).is_settled is False


def test_survivors_continue_when_all_have_claimed_or_are_accused() -> None:
    """A rank that nobody accuses is waited for."""
    reform = Reform(3, 4)
    assert offer(reform, claim(2, 1), claim(0, 1)) == []
    assert reform.missing() == [3]
    assert not reform.is_settled
    assert offer(reform, claim(3, 1)) == []
    assert reform.is_settled
    assert ranks(reform) == [0, 2, 3]
    assert reform.lost == {1}


def test_accused_survivor_that_comes_later_is_refused() -> None:
    """It lives, but the others have continued without it."""
    reform = Reform(3, 2)
    assert offer(reform, claim(0, 1), claim(1, 0)) == [1]
    assert ranks(reform) == [0]
    assert reform.is_settled


def test_accusation_of_an_earlier_claimant_counts_for_nothing() -> None:
    """Otherwise a late member could throw out those that wait."""
    reform = Reform(3, 3)
    assert offer(reform, claim(0), claim(1, 0, 2)) == []
    assert ranks(reform) == [0, 1]
    assert reform.lost == {2}


def test_two_halves_that_accuse_each_other_do_not_both_continue() -> None:
    """The half whose claim came first continues, in any interleaving."""
    halves = [claim(0, 2, 3), claim(1, 2, 3), claim(2, 0, 1), claim(3, 0, 1)]
    for order in itertools.permutations(halves):
        reform = Reform(3, 4)
        refused = offer(reform, *order)
        winners = {0, 1} if order[0].rank < 2 else {2, 3}
        assert set(ranks(reform)) == winners
        assert set(refused) == {0, 1, 2, 3} - winners
        assert reform.is_settled


def test_second_claim_of_a_survivor_replaces_the_first() -> None:
    """A survivor claims again when more members are lost."""
    reform = Reform(3, 3)
    offer(reform, claim(0, 1), claim(0, 1, 2))
    assert reform.lost == {1, 2}
    assert ranks(reform) == [0]
    assert reform.is_settled


def test_withdrawn_claim_takes_its_accusations_with_it() -> None:
    """A survivor that gives up must not keep another one out."""
    reform = Reform(3, 3)
    offer(reform, claim(0, 1, 2), claim(0, 1, 2))
    del reform.claims[0]
    assert ranks(reform) == []
    assert offer(reform, claim(2)) == []
    assert reform.missing() == [0, 1]


accusations = st.lists(st.frozensets(st.integers(0, 4)), min_size=5, max_size=5)


@settings(max_examples=60, deadline=None)
@given(accusations, st.permutations(range(5)))
def test_whoever_claims_first_continues(
    accused: list[frozenset[int]], order: list[int]
) -> None:
    reform = Reform(3, 5)
    claims = [claim(rank, *(accused[rank] - {rank}), size=5) for rank in order]
    refused = offer(reform, *claims)
    assert order[0] in ranks(reform)
    assert not reform.lost & set(ranks(reform))
    assert set(refused) == set(order) - set(ranks(reform))
    assert reform.is_settled
    assert ranks(reform) == sorted(ranks(reform))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_complete_world_reforms_without_accusations(size: int) -> None:
    """A member that has left need not be accused if everybody claims."""
    reform = Reform(3, size)
    assert offer(reform, *(claim(rank, size=size) for rank in range(size))) == []
    assert reform.is_settled
    assert reform.missing() == []
