"""transformers' table of weight conversions, built when this module is imported: a
thousand regular expressions, 0.1 to 0.2 s, which the fork server's replicas inherit."""

from __future__ import annotations

import contextlib
from typing import Any

# Older versions have no such function and build nothing.
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    find: Any = get_checkpoint_conversion_mapping
    find("")
