"""Check that a stage computes a row regardless of its padding.

Requests of different lengths share a batch, in which shorter rows are padded. Most
architectures ignore what the attention mask excludes. A trial of a few tokens computes
a row alone, and padded beside a longer one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multiworld.errors import SpecError
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.stage import Tensors

logger = logging.getLogger("multiworld.serve")

# Architectures that do not ignore padding: only rows of equal length share a batch.
UNPADDED = frozenset({"fnet", "yoso", "convbert", "nystromformer"})

SHORT, LONG = 5, 12  # tokens of the rows in a trial; a model may take fewer

SOME_IDS = 1000  # number of token ids from which a trial chooses

# Maximum difference between the two results, as a fraction of the largest number. The
# largest found for an architecture that ignores padding, in bfloat16, is 0.01.
TOLERANCE = 0.05


class Sizes(NamedTuple):
    """Sizes that a trial of a stage needs."""

    vocabulary: int
    hidden: int  # numbers of a token between two stages
    longest: int  # maximum number of tokens of a row
    pad: float  # token with which rows are padded


def check_stage(
    part: Any,  # a ``LayerPart``
    span: Span,
    sizes: Sizes,
    dtype: str,
    device: str,
    folder: Path,
) -> None:
    """Raise SpecError if rows of a loaded stage depend on their padding."""
    if part.whole.config.model_type in UNPADDED:
        return
    chance = torch.Generator().manual_seed(0)

    def ids(length: int) -> Tensor:
        table = part.whole.get_input_embeddings()
        few = min(sizes.vocabulary, getattr(table, "num_embeddings", 2), SOME_IDS)
        return torch.randint(few, (1, length), generator=chance).to(device)

    def rows(length: int) -> Tensor:
        made = torch.randn(1, length, sizes.hidden, generator=chance)
        return made.to(device, getattr(torch, dtype))

    if span.is_first:
        check(part, ids, "input_ids", sizes.pad, sizes.longest, folder)
    else:
        check(part, rows, "hidden", 0.0, sizes.longest, folder)


@torch.inference_mode()
def check(
    part: Callable[[Tensors], Tensors],
    inputs: Callable[[int], Tensor],  # returns random inputs, [1, length, …]
    name: str,  # of the first input
    padding: float,  # value with which it is padded
    longest: int,  # maximum number of tokens of a row
    folder: Path,
) -> None:
    """Raise SpecError if a stage's result depends on the padding of its input."""
    if longest <= SHORT:
        return
    short, long = inputs(SHORT), inputs(min(LONG, longest))
    mask = torch.ones(2, long.shape[1], dtype=torch.int64, device=short.device)
    mask[0, SHORT:] = 0
    both = torch.full_like(torch.cat([long, long]), padding)
    both[0, :SHORT], both[1] = short[0], long[0]
    alone = _result(part({name: short, "attention_mask": mask[1:, :SHORT]}))
    padded = _result(part({name: both, "attention_mask": mask}))
    if padded.ndim > 2:  # not pooled
        padded = padded[:, :SHORT]
    if not bool(alone.isfinite().all()):
        logger.warning("%s: a trial of padding overflows, and shows nothing", folder)
        return
    error = (padded[0] - alone[0]).abs().max()
    if not bool(error <= TOLERANCE * alone.abs().max()):
        raise SpecError(
            f"{folder}: this architecture does not ignore padding, so an answer would "
            "depend on other requests in its batch; write a factory with `ragged={}` "
            "for each stage"
        )


def _result(found: Tensors) -> Tensor:
    (result,) = (value for key, value in found.items() if key != "attention_mask")
    return result.float()
