"""Writer of ``world/blocking_world.py``: ``python -m tests.meta.blocking_facade``."""

from __future__ import annotations

import ast
import textwrap

from tests.meta.imports import SOURCE

DECLARED = (
    (SOURCE / "world" / "world.py", "World"),
    (SOURCE / "backends" / "collectives.py", "CollectiveMethods"),
)
"""Files and classes of the async methods."""

FACADE = SOURCE / "world" / "blocking_world.py"

WRITTEN_BY_HAND = {
    "handle",  # calls a function on the event loop
    "named_errors",  # a context manager
}

HEAD = '''"""The members of a world for programs without an event loop.

Written by ``python -m tests.meta.blocking_facade`` from ``multiworld.World``.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from multiworld.backends.base import Bundle
from multiworld.world.world import World, WorldStatistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


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


def facade() -> str:
    """Return the text of the module.

    It writes the members out, so that editors and type checkers know them.
    """
    found: list[str] = []
    for path, name in DECLARED:
        (declared,) = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        found += [
            _member(node)
            for node in declared.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            and node.name not in WRITTEN_BY_HAND
        ]
    return "\n".join([HEAD.rstrip("\n"), *found])


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    args, name = node.args, node.name
    assert node.returns is not None
    returned = ast.unparse(node.returns)
    given = ", ".join(
        [
            *(a.arg for a in args.args[1:]),
            *(f"{a.arg}={a.arg}" for a in args.kwonlyargs),
        ]
    )
    docstring = f'    """As ``multiworld.World.{name}``."""\n'
    if node.decorator_list:
        text = (
            f"\n@property\ndef {name}(self) -> {returned}:\n{docstring}"
            f"    return self._world.{name}"
        )
    elif isinstance(node, ast.FunctionDef):
        text = (
            f"\ndef {name}({ast.unparse(args)}) -> {returned}:\n{docstring}"
            f"    {'' if returned == 'None' else 'return '}self._world.{name}({given})"
        )
    else:
        wait = "_wait"
        if returned == "World":
            wait, returned = "_next", "Self"
        timeout = ast.arg("timeout_s", ast.parse("float | None", mode="eval").body)
        args.kwonlyargs.append(timeout)
        args.kw_defaults.append(ast.Constant(None))
        text = (
            f"\ndef {name}({ast.unparse(args)}) -> {returned}:\n{docstring}"
            f"    step = self._world.{name}({given})\n"
            f"    {'' if returned == 'None' else 'return '}self.{wait}(step, timeout_s)"
        )
    return textwrap.indent(text, "    ")


if __name__ == "__main__":
    FACADE.write_text(facade() + "\n")
