"""Recording of the objects that a module makes."""

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
    """Yield the objects of a class that a module makes, in order.

    Tests reach an inner object by this, and not by private attributes. ``name`` is the
    name by which the module calls the class, if ``kind`` is a fake.
    """
    made: list[T] = []

    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        made.append(kind(*args, **kwargs))
        return made[-1]

    with mock.patch.object(module, name or kind.__name__, make):
        yield made
