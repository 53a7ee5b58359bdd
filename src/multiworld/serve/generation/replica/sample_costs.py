"""Costs of sampling a token, by its parameters. Pure.

The unit is a row: the additional time of a step per sequence (4.7 ms for SmolLM2 on an
EPYC with one thread, where these costs were measured; 49,152 words).
"""

from __future__ import annotations

from multiworld.serve.transport.generation_messages import Sampling

DRAWN = 0.07
"""A random number, and the inverse of the distribution."""

LIMITED = 1.0
"""``top_p`` or ``min_p`` in the worst case: all words are about equally likely."""

PENALISED = 0.25
"""Penalties of up to a few thousand tokens."""

STRUCTURED = 0.5
"""A mask of the words that a structure allows; an intricate one may take longer."""

REPORTED, EACH_REPORTED = 0.02, 0.001
"""Probability of the token, and of each of the most likely ones."""

EACH_BIASED = 0.0001
"""One word of ``logit_bias``."""


def sample_rows_of(sampling: Sampling) -> float:
    """Return the cost of sampling one token, in rows."""
    cost = EACH_BIASED * len(sampling.logit_bias)
    if sampling.temperature > 0:
        cost += DRAWN
        if sampling.top_p < 1.0 or sampling.min_p > 0.0:
            cost += LIMITED
    if sampling.presence_penalty or sampling.frequency_penalty:
        cost += PENALISED
    if sampling.repetition_penalty != 1.0:
        cost += PENALISED
    if sampling.grammar:
        cost += STRUCTURED
    if sampling.logprobs is not None:
        cost += REPORTED + EACH_REPORTED * sampling.logprobs
    return cost
