"""Output of programs."""

from __future__ import annotations


def unhurried(text: str) -> str:
    """Return ``text`` without asyncio's warnings about slow steps (caused by load)."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Executing <"))
