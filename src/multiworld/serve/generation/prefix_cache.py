"""Keys, values and outputs of prefixes that several texts share. Shell."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.generation.prefixes import Digest


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prefix, as one stage has computed it.

    Attributes:
        layers: Keys and values by layer, [key heads, tokens, size] each.
        rows: Output of the stage, [tokens, hidden]; None in the last stage.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        kept = sum(key.nbytes + value.nbytes for key, value in self.layers.values())
        return kept + (0 if self.rows is None else self.rows.nbytes)


class PrefixCache:
    """Blocks by the names of their prefixes; the least recently used are dropped.

    Args:
        limit: Most bytes.

    Attributes:
        nbytes: Bytes of all blocks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[Digest, Block] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def find(self, names: Iterable[Digest]) -> list[Block]:
        """Return the blocks of the longest known prefix.

        Args:
            names: Names of the prefixes of a text, the shortest first.
        """
        found: list[Block] = []
        with self._lock:
            for name in names:
                block = self._blocks.get(name)
                if block is None:
                    break
                self._blocks.move_to_end(name)
                found.append(block)
        return found

    def has(self, name: Digest) -> bool:
        """Tell whether a prefix is known."""
        return name in self._blocks

    def put(self, name: Digest, block: Block) -> None:
        """Keep the last block of a prefix."""
        with self._lock:
            if name in self._blocks or block.nbytes > self._limit:
                return
            self._blocks[name] = block
            self.nbytes += block.nbytes
            while self.nbytes > self._limit:
                _, dropped = self._blocks.popitem(last=False)
                self.nbytes -= dropped.nbytes
