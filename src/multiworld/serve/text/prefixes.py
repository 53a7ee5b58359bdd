"""Digests of prefixes, and the replicas that computed them. Pure.

A prefix is named by a chained hash over its blocks of tokens, which is the same in
every process. The hash starts with the tenant's name: otherwise, a fast answer would
reveal that another tenant has sent the same prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

Digest = bytes  # hash that identifies a prefix
KNOWN = 65536  # maximum pairs of a prefix and a stage that a gateway remembers
# In the choice of a replica, this many cached tokens count as much as one stream less.
TOKENS_PER_STREAM = 128


def digests(tokens: Sequence[int], block_size: int, tenant: str) -> Iterator[Digest]:
    """Yield the digests of the prefixes that have one, two, … whole blocks."""
    last = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        last = hashlib.blake2b(last + block, digest_size=16).digest()
        yield last


class PrefixRoutes:
    """The replicas that last computed a prefix, by stage."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Digest, int], str] = OrderedDict()

    def record(self, names: Sequence[Digest], chain: Sequence[str]) -> None:
        """Record that ``chain`` computes a sequence with the prefixes ``names``."""
        for name in names:
            for stage, replica in enumerate(chain):
                self._known[name, stage] = replica
                self._known.move_to_end((name, stage))
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def matches(self, names: Sequence[Digest], stage: int) -> dict[str, int]:
        """Return the number of leading blocks that each replica has computed."""
        found: dict[str, int] = {}
        for count, name in enumerate(names, 1):
            replica = self._known.get((name, stage))
            if replica is None:
                break
            found[replica] = count
        return found
