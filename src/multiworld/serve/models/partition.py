"""Best cut of a chain of measured parts into stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.models.chain_partition import chain_partition

SLACK = 1.05  # how much slower the slowest stage may be, for more sequences


@dataclass(frozen=True, slots=True)
class Part:
    """Costs of one part: seconds per batch, and bytes of a token's KV blocks."""

    seconds: float
    kv_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain of parts, cut into stages that begin with the parts ``begins``."""

    begins: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bottleneck(self) -> int:
        """Number of the slowest stage."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


def cut(parts: Sequence[Part], stages: int) -> Cut:
    """Cut a chain of parts so that the slowest stage is as fast as possible."""
    seconds = [part.seconds for part in parts]
    spans = chain_partition(seconds, stages)
    # All stages have the same memory for KV blocks, so the one with most bytes per
    # token limits the sequences: among cuts of about equal speed, keep it small.
    if any(part.kv_bytes for part in parts):
        most = SLACK * max(sum(seconds[begin:end]) for begin, end in spans)
        memory = [part.kv_bytes for part in parts]
        spans = chain_partition(memory, stages, within=(seconds, most))
    return Cut(
        tuple(begin for begin, _ in spans),
        tuple(sum(seconds[begin:end]) for begin, end in spans),
    )
