"""Waiting of a computation's threads for each other. Pure.

By default, GNU OpenMP's threads spin for milliseconds at a barrier. If another process
takes one of their cores, the spinning ones take the time that the last one needs: with
two threads on two cores, and one other process that computes, a token of SmolLM2 took
more than a second in place of 12 ms. So they spin for some 20 µs only, and then sleep.
"""

from __future__ import annotations

from collections.abc import Mapping

SPIN, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""Variables that libgomp reads when it is loaded."""

SPINS = "1000"
"""Value of ``GOMP_SPINCOUNT``. Measured on an EPYC, one stage, bfloat16, 1 and 4
streams, tokens/s, alone and beside a process that computes: 300,000 (the default) 86
and 310, under 1; 5,000 88 and 290; 1,000 84 and 291, 29 and 110; 0 43 and 160, 63 and
205."""


def waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process that computes; none if the user has set them."""
    return {} if SPIN in environ or POLICY in environ else {SPIN: SPINS}


def others(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for an engine, which waits as its makers have chosen."""
    return {k: v for k, v in environ.items() if (k, v) != (SPIN, SPINS)}
