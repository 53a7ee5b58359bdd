"""Counts of streams, and of their times and tokens."""

from __future__ import annotations

import pytest

from multiworld.serve.gateway.streams.stream_counts import ENDS, StreamCounts


def test_times_and_tokens_of_streams_add_up() -> None:
    """A stream of one token has no time between tokens."""
    counts = StreamCounts()
    counts.first("m", 0.1, 0.2)
    counts.ended("m", 10, 5, 2.0, 5)
    counts.ended("m", 7, 1, 0.0, 1)
    found = {(kind, labels): value for kind, labels, value in counts.counted()}
    assert found["prompt_tokens", ("m",)] == 17
    assert found["generation_tokens", ("m",)] == 6
    assert found["first_token_seconds", ("m",)] == pytest.approx(0.3)
    assert found["output_token_seconds", ("m",)] == 0.5
    firsts = [end for end in ENDS if found["first_token_buckets", ("m", end)]]
    tokens = [end for end in ENDS if found["output_token_buckets", ("m", end)]]
    assert (firsts, tokens) == (["0.5"], ["0.5"])
