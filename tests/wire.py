"""Frames with arbitrary content, as any process could write them."""

from __future__ import annotations

import json


def frame_of(body: object) -> bytes:
    """Return a frame whose body is these bytes, or these values as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(data).to_bytes(4, "big") + data
