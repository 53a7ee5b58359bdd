"""Suite "large": as "generate", on a model that is larger than any cache.

Qwen3-0.6B's shape with random weights, in bfloat16 and with weights of 8 bits, as one
stage with two threads, beside vLLM's CPU build.
"""

from __future__ import annotations

from benchmarks.members import Options
from benchmarks.serving import large_model
from benchmarks.suites.generate import BFLOAT16, CUTS, INT8, ONE, OnStep, measure
from multiworld.demo import smollm2


def run(options: Options, on_step: OnStep) -> None:
    """Make the model, and measure its servers, one precision after the other.

    Raises:
        RuntimeError: A server did not start, or did not answer.
    """
    small = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    on_step(("step", (0.0, "making a model of 1.2 GB (once)")))
    folder = large_model.made(small)
    measure(folder, (BFLOAT16, INT8), {ONE: CUTS[ONE]}, options, on_step)
