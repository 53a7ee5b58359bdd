"""Cache of prefixes: KV blocks and output rows that several sequences use."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.text.prefixes import Digest
from multiworld.serve.wire.protocol import Key


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prefix at one stage: keys and values by layer, and output rows."""

    layers: dict[int, tuple[Tensor, Tensor]]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        kept = sum(key.nbytes + value.nbytes for key, value in self.layers.values())
        return kept + (0 if self.rows is None else self.rows.nbytes)


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A block of a prompt that a step completes, to be cached."""

    key: Key
    name: Digest  # digest of the prefix that ends with this block
    begin: int  # position of its first token
    end: int  # position after its last token


class PrefixCache:
    """LRU cache of blocks, by digest of their prefix, with at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[Digest, Block] = OrderedDict()
        self._uses: Counter[Digest] = Counter()
        self.nbytes = 0

    def use(self, names: Iterable[Digest]) -> list[Block]:
        """Return the cached blocks of a prefix, which are in use until ``release``."""
        found: list[Block] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            self._uses[name] += 1
            found.append(block)
        return found

    def release(self, names: Iterable[Digest]) -> None:
        """End the use of blocks that one call of ``use`` returned."""
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]

    def has(self, name: Digest) -> bool:
        return name in self._blocks

    def put(self, name: Digest, block: Block) -> None:
        """Cache the last block of a prefix, if there is room."""
        if name in self._blocks or not self._make_room(block.nbytes):
            return
        self._blocks[name] = block
        self.nbytes += block.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Drop least recently used blocks not in use; return whether that suffices."""
        if nbytes > self._limit:
            return False
        excess, dropped = self.nbytes + nbytes - self._limit, list[Digest]()
        for name, block in self._blocks.items() if excess > 0 else ():
            if name not in self._uses:
                dropped.append(name)
                excess -= block.nbytes
                if excess <= 0:
                    break
        for name in dropped:
            self.nbytes -= self._blocks.pop(name).nbytes
        return excess <= 0
