"""Digests of prefixes, and the replicas that computed them. Pure.

A prefix is named by a hash that is chained over its blocks of tokens, the same in every
process. The chain starts with the tenant, so that response times do not reveal other
tenants' requests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

Digest = bytes  # name of a prefix
KNOWN = 65536  # maximum pairs of a prefix and a stage that a gateway remembers
# Tokens of a cached prefix that outweigh one more stream at a replica.
TOKENS_PER_STREAM = 128


def digests(tokens: Sequence[int], block_size: int, tenant: str) -> Iterator[Digest]:
    """Yield the digests of the prefixes of one, two, … whole blocks."""
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
        """Record the chain that computes a sequence with the prefixes ``names``."""
        for name in names:
            for stage, replica in enumerate(chain):
                self._known[name, stage] = replica
                self._known.move_to_end((name, stage))
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def matches(self, names: Sequence[Digest], stage: int) -> dict[str, int]:
        """Return how many blocks of a sequence's prefix each replica has computed."""
        found: dict[str, int] = {}
        for count, name in enumerate(names, 1):
            replica = self._known.get((name, stage))
            if replica is None:
                break
            found[replica] = count
        return found
