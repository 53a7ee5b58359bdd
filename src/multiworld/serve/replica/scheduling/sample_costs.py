"""Costs of sampling a token, by the sampling parameters. Pure.

The unit is a row: the time that one more sequence adds to a step. These costs were
measured with SmolLM2 (a vocabulary of 49,152 tokens) on an EPYC with one thread and 64
sequences in a step, where a row takes 4.7 ms.
"""

from __future__ import annotations

from typing import NamedTuple

from multiworld.serve.wire.generation_messages import Sampling

# A ``top_k`` below this makes the sampler consider few tokens (``sampler.FEW``).
SMALL = 64
DRAWN = 0.015  # rows: a softmax and the random choice of a token
# Rows: ``top_p``, ``min_p`` or a large ``top_k``, in the worst case of equally likely
# tokens.
LIMITED = 0.15
PENALISED = 0.02  # rows: penalties of up to a few thousand tokens
# Rows: a mask of the allowed tokens; 0.02 if simple, more for most grammars.
STRUCTURED = 0.5
# Rows: the log-probability of the token, and of each of the likeliest tokens.
REPORTED, EACH_REPORTED = 0.02, 0.001
EACH_BIASED = 0.0001  # rows: one token of ``logit_bias``


HEAD = 0.2  # rows: the logits of a prompt token, which only ``prompt_logprobs`` needs


class SampleCosts(NamedTuple):
    """Sampling costs of one sequence, in rows; the rows that the sequence has in the
    step are counted separately."""

    token: float = 0.0  # rows for each sampled token
    scored: float = 0.0  # rows for each token of the prompt that is scored
    prompt: int = 0  # number of tokens of the prompt, if they are scored

    def of(self, begin: int, count: int, *, samples: bool) -> float:
        """Return the cost of ``count`` tokens from position ``begin``, in rows."""
        scored = max(0, min(count, self.prompt - 1 - begin))
        return self.token * samples + self.scored * scored


FREE = SampleCosts()


def costs_of(sampling: Sampling, prompt: int) -> SampleCosts:
    """Return the costs of a sequence whose prompt has ``prompt`` tokens."""
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
