"""What programs print."""

from __future__ import annotations


def unhurried(text: str) -> str:
    """Return ``text`` without what asyncio's debug mode says of slow steps.

    How long a step takes depends on what else the machine does; what of ours may block
    the loop is for ``tests/integration/test_loop.py``.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Executing <"))
