"""Calls in threads of their own."""

from __future__ import annotations

import sys

import pytest

from multiworld.net.threads import in_thread


async def test_call_that_exits_ends_nothing_else() -> None:
    """A ``SystemExit`` in a future would end the event loop."""
    with pytest.raises(RuntimeError, match="SystemExit: 70"):
        await in_thread(lambda: sys.exit(70))
