"""Costs of sampling a token, by its parameters. Pure.

The unit is a row: the additional time of a step per sequence (4.7 ms for SmolLM2 on an
EPYC with one thread, where these costs were measured; 49,152 words, 64 sequences in a
step).
"""

from __future__ import annotations

from typing import NamedTuple

from multiworld.serve.wire.generation_messages import Sampling

SMALL = 64  # ``top_k`` below which few words are considered: ``sampler.FEW``
DRAWN = 0.015  # a softmax, and the race of the words
# ``top_p``, ``min_p`` or a large ``top_k``; at worst all words are equally likely.
LIMITED = 0.15
PENALISED = 0.02  # penalties of up to a few thousand tokens
STRUCTURED = 0.5  # a mask of the allowed words: 0.02, but an intricate one takes longer
# The probability of the token, and of each of the most likely ones.
REPORTED, EACH_REPORTED = 0.02, 0.001
EACH_BIASED = 0.0001  # one word of ``logit_bias``


HEAD = 0.2  # the logits of a token of the prompt, which need not be computed otherwise


class SampleCosts(NamedTuple):
    """Costs of one sequence, in rows, beside the rows themselves."""

    token: float = 0.0  # to sample a token
    scored: float = 0.0  # to score a token of the prompt
    prompt: int = 0  # tokens of the prompt, if they are scored

    def of(self, begin: int, count: int, *, samples: bool) -> float:
        """Return the cost of a part of ``count`` tokens."""
        scored = max(0, min(count, self.prompt - 1 - begin))
        return self.token * samples + self.scored * scored


FREE = SampleCosts()


def costs_of(sampling: Sampling, prompt: int) -> SampleCosts:
    """Return the costs of a sequence with so many tokens in its prompt."""
    token = sample_rows_of(sampling)
    if sampling.prompt_logprobs is None:
        return SampleCosts(token)
    scored = HEAD + REPORTED + EACH_REPORTED * sampling.prompt_logprobs
    return SampleCosts(token, scored, prompt)


def sample_rows_of(sampling: Sampling) -> float:
    """Return the cost of sampling one token, in rows."""
    cost = EACH_BIASED * len(sampling.logit_bias)
    if sampling.temperature > 0:
        cost += DRAWN
        is_small = 0 < sampling.top_k < SMALL
        is_limited = sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.top_k
        if is_limited and not is_small:
            cost += LIMITED
    if (
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    ):
        cost += PENALISED
    if sampling.grammar:
        cost += STRUCTURED
    if sampling.logprobs is not None:
        cost += REPORTED + EACH_REPORTED * sampling.logprobs
    return cost
