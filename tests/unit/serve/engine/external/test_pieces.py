"""The requests into which a sequence is divided."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.engine.external.pieces import Piece, next_piece, seed_of
from multiworld.serve.wire.generation_messages import Sampling

PROMPT = [7, 8, 9]


def outcome(piece: Piece) -> list[int]:
    """Return what a server generates: a function of the request alone."""
    state = repr((piece.tokens, piece.seed, sorted(piece.bias.items())))
    draw = random.Random(state)
    return [draw.randrange(50) for _ in range(piece.count)]


def generated(sampling: Sampling, size: int | None, made: list[int]) -> list[int]:
    tokens = [*PROMPT, *made]
    while len(tokens) - len(PROMPT) < sampling.max_tokens:
        piece = next_piece(tokens, len(PROMPT), sampling, size)
        found = outcome(piece)
        assert [*piece.tokens, *piece.known] == tokens
        assert found[: len(piece.known)] == [*piece.known]
        tokens += found[len(piece.known) :]
    return tokens[len(PROMPT) :]


@given(
    size=st.sampled_from([1, 4, 32]),
    count=st.integers(1, 70),
    frequency=st.sampled_from([0.0, 0.5]),
    presence=st.sampled_from([0.0, 0.5]),
    cut=st.integers(0, 70),
)
def test_sequence_continues_exactly_from_every_token(
    size: int, count: int, frequency: float, presence: float, cut: int
) -> None:
    sampling = Sampling(
        seed=3,
        max_tokens=count,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias={4: 1.0},
    )
    whole = generated(sampling, size, [])
    assert len(whole) == count
    assert generated(sampling, size, whole[:cut]) == whole


def test_greedy_sequence_is_one_request() -> None:
    """It needs no random numbers, so nothing is computed twice."""
    sampling = Sampling(temperature=0.0, max_tokens=100)
    piece = next_piece([*PROMPT, *range(10)], len(PROMPT), sampling, 32)
    assert (piece.known, piece.count) == ((), 90)


@pytest.mark.parametrize("anew", [False, True])
def test_piece_anew_begins_at_the_next_token(anew: bool) -> None:
    """Such a piece is for a server that repeated the known tokens differently."""
    sampling = Sampling(max_tokens=100)
    piece = next_piece([*PROMPT, *range(10)], len(PROMPT), sampling, 32, anew=anew)
    assert piece.known == (() if anew else tuple(range(10)))
    assert piece.count == (22 if anew else 32)


def test_penalties_of_earlier_pieces_are_biases() -> None:
    """The server itself applies the penalties within a piece."""
    sampling = Sampling(max_tokens=9, frequency_penalty=0.5, logit_bias={1: 2.0})
    piece = next_piece([*PROMPT, 1, 1, 2, 5, 6], len(PROMPT), sampling, 4)
    assert piece.known == (6,)
    assert piece.bias == {1: 1.0, 2: -0.5, 5: -0.5}


def test_seeds_differ_by_choice_and_piece() -> None:
    """Pieces with equal seeds would share their random numbers."""
    seeds = {
        seed_of(Sampling(seed=seed, choice=choice), start)
        for seed in (0, 1, 2**63)
        for choice in (0, 1)
        for start in (0, 32)
    }
    assert len(seeds) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_no_end_comes_before_the_minimum() -> None:
    """``min_tokens`` counts from the first output token."""
    sampling = Sampling(max_tokens=100, min_tokens=40)
    tokens = [*PROMPT, *range(32)]
    assert next_piece(tokens, len(PROMPT), sampling, 32).min_tokens == 8
    # A server refuses a minimum that is above the maximum of its request.
    assert next_piece(PROMPT, len(PROMPT), sampling, 32).min_tokens == 32


def test_greedy_sequence_with_two_penalties_has_pieces() -> None:
    """A bias before the repetition penalty is not the frequency penalty after it."""
    sampling = Sampling(
        temperature=0.0, max_tokens=99, frequency_penalty=0.5, repetition_penalty=1.2
    )
    piece = next_piece([*PROMPT, *range(40)], len(PROMPT), sampling, 32)
    assert (len(piece.known), piece.count) == (8, 32)
