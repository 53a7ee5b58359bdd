"""The parts of a collective: its declaration, a call, what members agree on.

The collectives themselves are declared in ``backends.collectives``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from multiworld.backends.dtypes import DTYPES
from multiworld.backends.reduction import OP_NAMES


class Operation(NamedTuple):
    """One collective that is under way; equal on all members, or the world breaks.

    Attributes:
        number: Counts the collectives of a world, from 1.
        code: ``Collective.code``.
        dtype: Code of the dtype.
        elements: Elements of one member's tensor.
        root: The rank that gives or gets; 0 where there is none.
        op: Code of the reduce operation; 0 where there is none.
    """

    number: int
    code: int
    dtype: int
    elements: int
    root: int
    op: int

    def label(self) -> int:
        """Return code, op and root in 32 bits."""
        return self.code << 24 | self.op << 16 | self.root

    def __str__(self) -> str:
        name = name_of(self.code)
        has_root = self.code not in _BY_CODE or _BY_CODE[self.code].has_root
        root = f", root {self.root}" if has_root else ""
        op = f", {OP_NAMES.get(self.op, self.op)}" if self.op else ""
        dtype = str(DTYPES.get(self.dtype, self.dtype)).removeprefix("torch.")
        return f"{name} #{self.number} of {self.elements} {dtype}{root}{op}"


Steps = Callable[[Operation], Awaitable[None]]
"""Carries out one operation over lanes, when it is its turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """The declaration of a collective.

    Attributes:
        name: Its name as a method of ``World``.
        code: Its number on the wire, 1 byte; never used for another one.
        has_root: Whether one rank gives or gets.
        start: Takes ``LaneCollectives`` and a call; checks the call at once,
            before it gets its number; returns its steps.
    """

    name: str
    code: int
    has_root: bool
    start: Callable[..., Steps]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a collective by this member.

    Attributes:
        collective: Which one.
        tensor: The tensor of this member; all members' have one dtype and size.
        tensors: A list by rank, where the collective takes or fills one here.
        more: Another list by rank.
        root: The rank that gives or gets.
        op: The ``ReduceOp``; None where nothing is reduced.
    """

    collective: Collective
    tensor: Tensor
    tensors: Sequence[Tensor] | None = None
    more: Sequence[Tensor] | None = None
    root: int = 0
    op: Any = None


class Collectives(Protocol):
    """The collectives of one world on one backend."""

    async def run(self, call: Call) -> None:
        """Carry out a call together with all other members, who make the same.

        Raises:
            TensorMismatchError: The tensors cannot be used, or the members did not call
                the same; in the latter case the world breaks.
            MemberLeftError: A member has left that it needs.

        Cancellation: breaks the world, since the others count on this member.
        """


_BY_CODE: dict[int, Collective] = {}


def name_of(code: int) -> str:
    """Return the name of the collective with this number on the wire."""
    return _BY_CODE[code].name if code in _BY_CODE else f"collective {code}"


def declare(
    code: int, *, has_root: bool = False
) -> Callable[[Callable[..., Steps]], Collective]:
    """Return a decorator that declares a collective by its function over lanes."""

    def add(start: Callable[..., Steps]) -> Collective:
        assert code not in _BY_CODE, f"two collectives have the code {code}"
        found = Collective(start.__name__.lower(), code, has_root, start)
        _BY_CODE[code] = found
        return found

    return add
