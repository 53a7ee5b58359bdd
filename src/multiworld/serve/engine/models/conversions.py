"""Preloading of transformers' weight conversions: importing this module builds their
table. Its thousand regular expressions take 0.1 to 0.2 s, so replicas inherit the table
from the fork server."""

from __future__ import annotations

import contextlib
from typing import Any

# Older versions of transformers have no such function, and build nothing.
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    find: Any = get_checkpoint_conversion_mapping
    find("")
