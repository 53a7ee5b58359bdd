"""Writes ``world/blocking_collectives.py``: ``python -m tests.meta.blocking_facade``.

The blocking methods follow from the declarations in ``backends.collectives``: the same
signature with ``timeout_s``. They are written out so that editors and type checkers
know them.
"""

from __future__ import annotations

import ast
import textwrap

from tests.meta.imports import SOURCE

DECLARED = SOURCE / "backends" / "collectives.py"
FACADE = SOURCE / "world" / "blocking_collectives.py"

HEAD = '''"""The collectives for programs without an event loop.

Written by ``python -m tests.meta.blocking_facade`` from ``backends.collectives``.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.collectives import CollectiveMethods

T = TypeVar("T")


class BlockingCollectives:
    """The collectives as methods that wait.

    Each takes ``timeout_s``, seconds to wait or None, and raises ``TimeoutError`` when
    they are over; the world is broken then.
    """

    def __init__(self, collectives: CollectiveMethods) -> None:
        self._collectives = collectives

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the world's loop, and wait for it."""
        raise NotImplementedError
'''


def facade() -> str:
    """Return the text of the module."""
    tree = ast.parse(DECLARED.read_text())
    (methods,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "CollectiveMethods"
    ]
    found = [
        _method(node)
        for node in methods.body
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    return "\n".join([HEAD.rstrip("\n"), *found])


def _method(node: ast.AsyncFunctionDef) -> str:
    args = node.args
    timeout = ast.arg("timeout_s", ast.parse("float | None", mode="eval").body)
    positional = [a.arg for a in args.args[1:]]
    keyword = [f"{a.arg}={a.arg}" for a in args.kwonlyargs]
    args.kwonlyargs.append(timeout)
    args.kw_defaults.append(ast.Constant(None))
    assert node.returns is not None
    given = ", ".join([*positional, *keyword])
    text = (
        f"\ndef {node.name}({ast.unparse(args)}) -> {ast.unparse(node.returns)}:\n"
        f'    """Wait for ``multiworld.World.{node.name}``."""\n'
        f"    step = self._collectives.{node.name}({given})\n"
        f"    return self._wait(step, timeout_s)"
    )
    return textwrap.indent(text, "    ")


if __name__ == "__main__":
    FACADE.write_text(facade() + "\n")
