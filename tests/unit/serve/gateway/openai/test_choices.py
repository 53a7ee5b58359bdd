"""Digests of requests, which identify poison requests."""

from __future__ import annotations

from multiworld.serve.gateway.openai.choices import digest_of
from multiworld.serve.wire.generation_messages import Sampling


def test_digest_is_of_all_parameters_but_the_seed() -> None:
    biases = {28: -5.0, 3: 1.0}
    first = digest_of([], Sampling(seed=1, logit_bias=biases))
    swapped = dict(reversed(biases.items()))
    assert digest_of([], Sampling(seed=2, logit_bias=swapped)) == first
    for other in ({}, {28: -5.0}, {28: 1.0, 3: -5.0}):
        assert digest_of([], Sampling(logit_bias=other)) != first
    assert digest_of([], Sampling(logit_bias=biases, top_k=3)) != first
