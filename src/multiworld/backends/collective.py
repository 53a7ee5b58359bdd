"""A collective: its declaration, a call, and the terms that the members agree on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from multiworld.backends.dtypes import DTYPES, code_of
from multiworld.backends.reduction import OP_CODES, OP_NAMES, op_name


class Operation(NamedTuple):
    """One collective in progress; equal on all members, or the world breaks."""

    number: int  # counts the collectives of a world, from 1
    code: int
    dtype: int
    elements: int  # of one member's tensor
    root: int  # 0 if the collective has no root
    op: int  # 0 if the collective has no reduction operation

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


# Carries out one operation over lanes, when its turn comes.
Steps = Callable[[Operation], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """The declaration of a collective."""

    name: str  # as a method of ``World``
    code: int  # on the wire; 1 byte, never reused
    has_root: bool
    # Takes ``LaneCollectives`` and a call. Checks the call, and returns its ``Steps``,
    # before the call gets a number.
    start: Callable[..., Steps]


@dataclass(frozen=True, slots=True)
class Call:
    """This member's call of a collective; all tensors have one dtype and size."""

    collective: Collective
    tensor: Tensor
    tensors: Sequence[Tensor] | None = None  # by rank; None if not used here
    more: Sequence[Tensor] | None = None  # by rank; None if not used here
    root: int = 0
    op: Any = None

    def operation(self, number: int) -> Operation:
        op = 0 if self.op is None else OP_CODES[op_name(self.op)]
        dtype, count = code_of(self.tensor), self.tensor.numel()
        return Operation(number, self.collective.code, dtype, count, self.root, op)


class Collectives(Protocol):
    """The collectives of one world on one backend."""

    async def run(self, call: Call) -> None:
        """Carry out a call together with all other members, which make the same call.

        Raises ``TensorMismatchError`` if the tensors cannot be used or the members'
        calls differ (which breaks a world over lanes), and ``MemberLeftError`` if a
        needed member has left. Cancelling breaks the world, because the other members
        wait for this one.
        """


_BY_CODE: dict[int, Collective] = {}


def name_of(code: int) -> str:
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
