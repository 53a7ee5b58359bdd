"""Output of programs."""

from __future__ import annotations


def unhurried(text: str) -> str:
    """Return ``text`` without the warnings of asyncio's debug mode about slow steps.

    The time of a step depends on the load of the machine. Blocked event loops are the
    subject of ``tests/integration/test_loop.py``.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Executing <"))
