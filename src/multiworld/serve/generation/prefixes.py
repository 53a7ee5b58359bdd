"""Names of prefixes of texts, and where they were computed. Pure.

A prefix is named by a chain of hashes, one for each block of its tokens, which begins
with the tenant. So equal prefixes of one tenant have equal names in every process, and
nobody can find out by the time of an answer what another tenant has asked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

Digest = bytes
"""Name of a prefix."""

KNOWN = 65536
"""Most prefixes that a gateway remembers."""

TOKENS_PER_STREAM = 128
"""Tokens of a known prefix that outweigh one more stream at a replica."""


def digests(tokens: Sequence[int], block_size: int, tenant: str) -> Iterator[Digest]:
    """Yield the names of the prefixes of one, two, … whole blocks.

    Args:
        tokens: The tokens.
        block_size: Tokens of a block.
        tenant: Whose they are.
    """
    last = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        last = hashlib.blake2b(last + block, digest_size=16).digest()
        yield last


class PrefixRoutes:
    """The replicas that computed a prefix last, by stage."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Digest, int], str] = OrderedDict()

    def record(self, names: Sequence[Digest], chain: Sequence[str]) -> None:
        """Record that a chain computes a text.

        Args:
            names: Names of its prefixes, the shortest first.
            chain: Replicas by stage.
        """
        for name in names:
            for stage, replica in enumerate(chain):
                self._known[name, stage] = replica
                self._known.move_to_end((name, stage))
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def matches(self, names: Sequence[Digest], stage: int) -> dict[str, int]:
        """Return how many blocks of a text each replica of a stage has computed.

        Args:
            names: Names of its prefixes, the shortest first.
            stage: Number of the stage.
        """
        found: dict[str, int] = {}
        for count, name in enumerate(names, 1):
            replica = self._known.get((name, stage))
            if replica is None:
                break
            found[replica] = count
        return found
