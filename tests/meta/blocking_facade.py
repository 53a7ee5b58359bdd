"""Writer of ``world/blocking_world.py``: ``python -m tests.meta.blocking_facade``."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from tests.meta.imports import SOURCE

DECLARED = (
    (SOURCE / "world" / "world.py", "World"),
    (SOURCE / "backends" / "collectives.py", "CollectiveMethods"),
)
"""Files and classes of the async methods."""

FACADE = SOURCE / "world" / "blocking_world.py"

MANAGER = SOURCE / "world" / "manager.py"

MANAGED = ("join", "keep", "leave")
"""Methods of the manager; the others are pymultiworld's, or written by hand."""

WRITTEN_BY_HAND = {
    "handle",  # calls a function on the event loop
    "named_errors",  # a context manager
}

HEAD = '''"""The members of a world for programs without an event loop.

Written by ``python -m tests.meta.blocking_facade`` from ``multiworld.World``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from multiworld.backends.base import Bundle
from multiworld.config import WorldConfig
from multiworld.world.manager import WorldManager
from multiworld.world.world import World, WorldStatistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
W = TypeVar("W")


class BlockingWorld:
    """The properties and methods of a world; those that wait take ``timeout_s``."""

    _world: World

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the world's loop, and wait for it."""
        raise NotImplementedError

    def _next(
        self, step: Coroutine[Any, Any, World], timeout_s: float | None
    ) -> Self:
        """Wait for the next incarnation."""
        raise NotImplementedError
'''


MANAGER_HEAD = '''

class BlockingManager(Generic[W]):
    """Methods of a manager; those that wait take ``timeout_s``. ``W``: world type."""

    _manager: WorldManager

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the manager's loop, and wait for it."""
        raise NotImplementedError

    def _next(self, step: Coroutine[Any, Any, World], timeout_s: float | None) -> W:
        """Wait for a world."""
        raise NotImplementedError

    def _each(self, worlds: AsyncIterator[World]) -> Iterator[W]:
        """Iterate over worlds, waiting for each one."""
        raise NotImplementedError
'''


def facade() -> str:
    """Return the text of the module."""
    found: list[str] = []
    for path, name in DECLARED:
        found += [
            _member(node, "_world", "World", "Self")
            for node in _methods(path, name)
            if not node.name.startswith("_") and node.name not in WRITTEN_BY_HAND
        ]
    managed = [
        _member(node, "_manager", "WorldManager", "W")
        for node in _methods(MANAGER, "WorldManager")
        if node.name in MANAGED
    ]
    return "\n".join([HEAD.rstrip("\n"), *found, MANAGER_HEAD.rstrip("\n"), *managed])


def _methods(path: Path, name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    (declared,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in declared.body if isinstance(node, kinds)]


def _member(
    node: ast.FunctionDef | ast.AsyncFunctionDef, target: str, owner: str, world: str
) -> str:
    args, name = node.args, node.name
    assert node.returns is not None
    returned = ast.unparse(node.returns)
    given = ", ".join(
        [
            *(a.arg for a in args.args[1:]),
            *(f"{a.arg}={a.arg}" for a in args.kwonlyargs),
        ]
    )
    docstring = f'    """As ``multiworld.{owner}.{name}``."""\n'
    if node.decorator_list:
        text = (
            f"\n@property\ndef {name}(self) -> {returned}:\n{docstring}"
            f"    return self.{target}.{name}"
        )
    elif returned == "AsyncIterator[World]":
        text = (
            f"\ndef {name}({ast.unparse(args)}) -> Iterator[{world}]:\n{docstring}"
            f"    return self._each(self.{target}.{name}({given}))"
        )
    elif isinstance(node, ast.FunctionDef):
        text = (
            f"\ndef {name}({ast.unparse(args)}) -> {returned}:\n{docstring}"
            f"    {'' if returned == 'None' else 'return '}"
            f"self.{target}.{name}({given})"
        )
    else:
        wait = "_wait"
        if returned == "World":
            wait, returned = "_next", world
        timeout = ast.arg("timeout_s", ast.parse("float | None", mode="eval").body)
        args.kwonlyargs.append(timeout)
        args.kw_defaults.append(ast.Constant(None))
        text = (
            f"\ndef {name}({ast.unparse(args)}) -> {returned}:\n{docstring}"
            f"    step = self.{target}.{name}({given})\n"
            f"    {'' if returned == 'None' else 'return '}self.{wait}(step, timeout_s)"
        )
    return textwrap.indent(text, "    ")


if __name__ == "__main__":
    FACADE.write_text(facade() + "\n")
