"""Keys, values and outputs of prefixes that several texts share."""

from __future__ import annotations

from collections import Counter, OrderedDict
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

    Blocks that a text is to begin with are in use until it does: they are not dropped.

    Args:
        limit: Most bytes.

    Attributes:
        nbytes: Bytes of all blocks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[Digest, Block] = OrderedDict()
        self._uses: Counter[Digest] = Counter()
        self.nbytes = 0

    def use(self, names: Iterable[Digest]) -> list[Block]:
        """Return the blocks of the longest known prefix; they are in use now.

        Args:
            names: Names of the prefixes of a text, the shortest first.
        """
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
        """Let blocks be dropped again.

        Args:
            names: Those that one call of ``use`` has found.
        """
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]

    def has(self, name: Digest) -> bool:
        """Tell whether a prefix is known."""
        return name in self._blocks

    def put(self, name: Digest, block: Block) -> None:
        """Keep the last block of a prefix, if there is room."""
        if name in self._blocks or not self._make_room(block.nbytes):
            return
        self._blocks[name] = block
        self.nbytes += block.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Drop the blocks that were used least recently; tell if that suffices."""
        if nbytes > self._limit:
            return False
        unused = (name for name in list(self._blocks) if name not in self._uses)
        while self.nbytes + nbytes > self._limit:
            name = next(unused, None)
            if name is None:
                return False
            self.nbytes -= self._blocks.pop(name).nbytes
        return True
