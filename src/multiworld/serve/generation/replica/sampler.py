"""Sampling of the next token of each sequence.

Random numbers are counter-based (Philox: Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", 2011): each follows from the seed, the choice and the index of the
token, so a recomputed sequence samples the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

from multiworld.serve.transport.generation_messages import Sampling

FEW = 1024
"""Number of most likely tokens that ``top_p`` and ``min_p`` consider first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token; log-probabilities are those before any parameter applies."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Tensor,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt: int,
    ends: Sequence[int],
    allowed: Tensor | None = None,
) -> Choice:
    """Sample the next token; raise ValueError if the largest logit is not finite.

    Args:
        logits: Shape [vocabulary], float32; not changed.
        tokens: The prompt and the output tokens.
        prompt: Number of prompt tokens.
        ends: Tokens that end the sequence.
        allowed: Tokens that its structure allows, [vocabulary], bool; None: all.
    """
    best = float(logits.max())  # NaN if any of them is
    if not math.isfinite(best):
        raise ValueError(f"the largest logit is {best}, no finite number")
    index = len(tokens) - prompt
    scores = _adjusted(logits, sampling, tokens, prompt)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if index < sampling.min_tokens and ends:
        later = scores.index_fill(-1, torch.tensor(ends), float("-inf"))
        # Its structure may only allow the end.
        scores = later if bool((later > float("-inf")).any()) else scores
    if sampling.temperature == 0:
        token = int(scores.argmax())
    else:
        token = _drawn(scores / sampling.temperature, sampling, index)
    if sampling.logprobs is None:
        return Choice(token)
    logprobs = logits.log_softmax(-1)
    most = logprobs.topk(sampling.logprobs)
    top = tuple(zip(most.indices.tolist(), most.values.tolist(), strict=True))
    return Choice(token, float(logprobs[token]), top)


def _adjusted(
    logits: Tensor, sampling: Sampling, tokens: Sequence[int], prompt: int
) -> Tensor:
    """Return the logits with penalties and biases; ``logits`` itself without any."""
    scores = logits
    if sampling.logit_bias:  # before the penalties, as in vLLM
        scores = scores.clone()
        biased = torch.tensor(list(sampling.logit_bias))
        scores[biased] += torch.tensor(list(sampling.logit_bias.values()))
    if sampling.repetition_penalty != 1.0:
        scores = scores.clone()
        seen = torch.tensor(sorted(set(tokens)))
        found = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(
        tokens
    ) > prompt:
        scores = scores.clone()
        made, times = torch.unique(
            torch.tensor(list(tokens[prompt:])), return_counts=True
        )
        scores[made] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return scores


def _drawn(scores: Tensor, sampling: Sampling, index: int) -> int:
    """Draw a token by inverting the cumulative distribution."""
    at = uniform(sampling.seed, sampling.choice, index)
    probabilities = scores.to(torch.float64).softmax(-1)
    has_limits = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0
    least = sampling.min_p * float(probabilities.max())
    if not has_limits:
        return _inverse(probabilities, at)
    # Sorting the whole vocabulary takes longer than everything else.
    for most in (sampling.top_k,) if sampling.top_k else (FEW, len(scores)):
        which = scores.topk(min(most, len(scores))).indices
        likely = probabilities[which]
        # As in vLLM: min_p, then top_k, then top_p, each applied to what remains.
        whole = likely if sampling.top_k else probabilities
        kept = _kept(likely, sampling, least, float(whole[whole >= least].sum()))
        if not bool(kept[-1]):
            break  # less likely ones do not remain either
    return int(which[_inverse(likely * kept, at)])


def _kept(likely: Tensor, sampling: Sampling, least: float, whole: float) -> Tensor:
    """Return which of the most likely tokens (descending) remain; always the first."""
    kept = likely >= least
    if sampling.top_p < 1.0:
        # A token remains if the more likely ones sum to less than top_p.
        kept &= likely.cumsum(0) - likely < sampling.top_p * whole
    kept[0] = True
    return kept


def _inverse(weights: Tensor, at: float) -> int:
    """Return the index where the cumulative weights exceed a share of their sum."""
    sums = weights.cumsum(0)
    place = int(torch.searchsorted(sums, at * float(sums[-1]), right=True))
    return min(place, int(weights.nonzero()[-1]))


def uniform(seed: int, choice: int, index: int) -> float:
    """Return the random number in [0, 1) for the token at ``index`` of a choice."""
    key = numpy.array([seed % 2**64, choice], dtype=numpy.uint64)
    counter = numpy.array([index, 0, 0, 0], dtype=numpy.uint64)
    bits = numpy.random.Philox(key=key, counter=counter)
    return float(numpy.random.Generator(bits).random())


def finish_of(
    token: int, count: int, sampling: Sampling, ends: Sequence[int]
) -> Literal["", "stop", "length"]:
    """Return ``stop`` or ``length`` if a token is the last one; else empty."""
    if token in ends:
        return "stop"
    return "length" if count >= sampling.max_tokens else ""
