"""The best cut of a chain of measured parts into stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.models.chain_partition import chain_partition

SLACK = 1.05
"""Factor by which the slowest stage may be slower, for the sake of more texts that have
room."""


@dataclass(frozen=True, slots=True)
class Part:
    """Costs of one part of a model.

    Attributes:
        seconds: Seconds for one batch.
        kv_bytes: Bytes of the keys and values of one token, if it generates text.
    """

    seconds: float
    kv_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain of parts, cut into stages.

    Attributes:
        begins: Number of the first part of each stage.
        seconds: Seconds for one batch in each stage.
    """

    begins: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bottleneck(self) -> int:
        """The number of the slowest stage."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


def cut(parts: Sequence[Part], stages: int) -> Cut:
    """Cut a chain of parts so that the slowest stage is as fast as possible.

    Every stage has as much memory for keys and values, so the one that keeps the most
    for a token limits the texts. Of cuts that are about as fast, that with the least
    there is chosen.

    Raises:
        ValueError: There are fewer parts than stages.
    """
    seconds = [part.seconds for part in parts]
    spans = chain_partition(seconds, stages)
    if any(part.kv_bytes for part in parts):
        most = SLACK * max(sum(seconds[begin:end]) for begin, end in spans)
        memory = [part.kv_bytes for part in parts]
        spans = chain_partition(memory, stages, within=(seconds, most))
    return Cut(
        tuple(begin for begin, _ in spans),
        tuple(sum(seconds[begin:end]) for begin, end in spans),
    )
