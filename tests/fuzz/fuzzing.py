"""Mutations of valid samples, and checks that are repeated for some seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

FUZZ_S = 10.0
"""Seconds per target."""

EXAMPLES = 200
"""Examples between two checks of the time."""

Edit = tuple[float, str, bytes]

EDITS = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["set", "cut", "insert", "repeat"]),
    st.binary(min_size=1, max_size=8),
)


def mutated(*samples: bytes) -> SearchStrategy[bytes]:
    return st.builds(_mutate, st.sampled_from(samples), st.lists(EDITS, max_size=6))


def _mutate(sample: bytes, edits: list[Edit]) -> bytes:
    for where, kind, part in edits:
        at = int(where * len(sample))
        match kind:
            case "set":
                sample = sample[:at] + part + sample[at + len(part) :]
            case "cut":
                sample = sample[:at] + sample[at + part[0] :]
            case "insert":
                sample = sample[:at] + part + sample[at:]
            case _:
                sample = sample[:at] + sample[at : at + 8] * part[0] + sample[at:]
    return sample


def repeat(
    check: Callable[[bytes], object],
    inputs: SearchStrategy[bytes],
    seconds: float = FUZZ_S,
) -> None:
    """Run a check on random inputs for some seconds; a failure prints its input."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = random.getrandbits(32)

        @seed(number)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def once(value: bytes) -> None:
            check(value)

        once()
