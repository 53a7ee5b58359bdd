"""Division of a sequence into requests to a server that samples itself. Pure.

Such a server has one random state for each request. If a request is interrupted, the
state is lost with the server, so the output could not continue exactly. Therefore the
output is divided into pieces. Each piece is one request, whose seed is derived from the
seed of the sequence, the choice and the index of the piece's first token. To continue
within a piece, the whole piece is requested again: the server repeats the known tokens,
and then generates the next ones.

A server applies penalties only to tokens that it generated in the same request. For the
tokens of earlier pieces, ``logit_bias`` subtracts the same penalties. A token that is
in an earlier piece and in the current one would get the presence penalty twice, so this
penalty needs pieces of one token.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.wire.generation_messages import Sampling

GREEDY_BELOW = 1e-5  # temperatures below this count as 0, as in vLLM


@dataclass(frozen=True, slots=True)
class Piece:
    """One request of a sequence."""

    tokens: tuple[int, ...]  # the prompt, and the output tokens before this piece
    known: tuple[int, ...]  # output tokens of this piece that earlier requests returned
    count: int  # maximum number of tokens of this piece, including ``known``
    seed: int  # seed of the request, 31 bits
    bias: dict[int, float]  # values to add to the logits, by token
    min_tokens: int  # number of this piece's first tokens that must not be end tokens


def next_piece(
    tokens: Sequence[int],
    prompt: int,
    sampling: Sampling,
    # Maximum tokens of a piece; None: one request for all remaining tokens, which is
    # not exact if tokens are sampled.
    size: int | None,
    *,
    anew: bool = False,  # start a piece at the next token, even within a piece
) -> Piece:
    """Return the request that continues a sequence."""
    index, size = len(tokens) - prompt, size_of(sampling, size)
    start = index
    if size is not None and not anew:
        start -= index % size
    left = sampling.max_tokens - start
    count = left if size is None else min(left, size - start % size)
    before = tokens[: prompt + start]
    return Piece(
        tokens=tuple(before),
        known=tuple(tokens[prompt + start :]),
        count=count,
        seed=seed_of(sampling, start),
        bias=bias_of(sampling, before[prompt:]),
        min_tokens=min(count, max(0, sampling.min_tokens - start)),
    )


def is_greedy(sampling: Sampling) -> bool:
    """Return whether the most likely token is chosen, without a random number."""
    return sampling.temperature < GREEDY_BELOW


def size_of(sampling: Sampling, size: int | None) -> int | None:
    """Return the maximum number of tokens of a piece; None: no maximum."""
    if size is not None and sampling.presence_penalty:
        return 1
    # All requests of a sequence must use the same pieces, because penalties that the
    # server computes and penalties given as biases lead to different results: a server
    # applies its own penalties after the biases, and accepts only a limited number of
    # biases.
    is_whole = is_greedy(sampling) and not sampling.frequency_penalty
    return None if is_whole and size != 1 else size


def seed_of(sampling: Sampling, start: int) -> int:
    """Return the seed of a piece, derived from the sequence's seed; 31 bits."""
    data = struct.pack("<QQQ", sampling.seed % 2**64, sampling.choice, start)
    digest = hashlib.blake2b(data, digest_size=4, person=b"piece").digest()
    return int.from_bytes(digest, "little") >> 1


def bias_of(sampling: Sampling, made: Sequence[int]) -> dict[int, float]:
    """Return ``logit_bias``, minus the penalties for the output tokens so far."""
    found = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, times in Counter(made).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * times
            found[token] = found.get(token, 0.0) - penalty
    return found
