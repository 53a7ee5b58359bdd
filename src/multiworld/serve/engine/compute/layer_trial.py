"""Trial that shows whether rows of whole layers are bit-identical in all steps. A layer
may fail even if its matmuls, attention and activations are batch-invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import ModelFailedError
from multiworld.serve.engine.compute.batch_invariant_functions import (
    InvariantFunctions,
)
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows

# Number of the sequence (0 or 1), and number of its next rows to compute.
Part = tuple[int, int]

# Ways to divide 64 rows of sequence 0 into steps, some with rows of sequence 1.
STEPS: tuple[tuple[tuple[Part, ...], ...], ...] = (
    (((0, 61),), *(((0, 1),),) * 3),
    (((0, 17), (1, 30)), ((1, 1), (0, 1)), ((0, 46), (1, 2))),
    (((1, 40),), ((0, 64), (1, 1))),
)

COUNT = 64  # rows of each sequence


def calls_functions(stage: Any, cache: Callable[[], KvCache]) -> bool:
    """Return whether a stage calls elementwise functions, instead of modules."""
    given = [stage.example(COUNT, 0)]
    with torch.inference_mode(), InvariantFunctions() as mode:
        _computed(stage, cache(), given, ((((0, COUNT),)),))
    return bool(mode.found)


def check_layers(stage: Any, cache: Callable[[], KvCache]) -> None:
    """Raise ModelFailedError unless rows are bit-identical in all ``STEPS``."""
    given = [stage.example(COUNT, seed) for seed in (0, 1)]
    with torch.inference_mode():
        wanted = _computed(stage, cache(), given, ((((0, COUNT),)),))
        for steps in STEPS:
            if not torch.equal(_computed(stage, cache(), given, steps), wanted):
                threads = torch.get_num_threads()
                remedy = "set threads: 1 for the stage, or " if threads > 1 else ""
                raise ModelFailedError(
                    "deterministic: true is not possible: on this machine, rows are "
                    f"not bit-identical in different steps ({threads} threads); "
                    f"{remedy}remove deterministic"
                )


def _computed(
    stage: Any,
    cache: KvCache,
    given: Sequence[Tensor],
    steps: Sequence[Sequence[Part]],
) -> Tensor:
    """Return the outputs of all rows of sequence 0, [rows, outputs]."""
    done, found = [0, 0], []
    for parts in steps:
        rows = [Rows(number, done[number], count) for number, count in parts]
        x = torch.cat([given[n][done[n] : done[n] + count] for n, count in parts])
        at = torch.cat([torch.arange(r.begin, r.begin + r.count) for r in rows])
        out = stage(x, at, cache.step(rows), torch.arange(len(at)))
        pieces = torch.split(out, [count for _, count in parts])
        found += [p for (n, _), p in zip(parts, pieces, strict=True) if n == 0]
        for number, count in parts:
            done[number] += count
    return torch.cat(found)
