"""transformers' table of weight conversions, which importing this module builds. Its
thousand regular expressions take 0.1 to 0.2 s, so replicas inherit it from the fork
server."""

from __future__ import annotations

import contextlib
from typing import Any

# Older versions of transformers have no such function, and build nothing.
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    find: Any = get_checkpoint_conversion_mapping
    find("")
