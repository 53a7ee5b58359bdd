"""The parts that a module makes for itself, for tests that need one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import ParamSpec, TypeVar
from unittest import mock

T = TypeVar("T")
P = ParamSpec("P")


@contextlib.contextmanager
def recorded(
    module: ModuleType, kind: Callable[P, T], name: str = ""
) -> Iterator[list[T]]:
    """Yield the objects of a class that a module makes, in the order of their making.

    A test reaches a part by this, and not by the attributes of the object that owns
    it.

    Args:
        module: The module that calls the class.
        kind: The class.
        name: The name by which the module calls it, if ``kind`` is a fake.
    """
    made: list[T] = []

    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        made.append(kind(*args, **kwargs))
        return made[-1]

    with mock.patch.object(module, name or kind.__name__, make):
        yield made
