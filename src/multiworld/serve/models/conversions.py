"""transformers' table of weight conversions, built when this module is imported.

transformers compiles a thousand regular expressions at the first load of a model in a
process, which takes 0.1 to 0.2 s. If the fork server imports this module, all its
replicas inherit them.
"""

from __future__ import annotations

import contextlib
from typing import Any

# Older versions have no such function and build nothing.
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    find: Any = get_checkpoint_conversion_mapping
    find("")
