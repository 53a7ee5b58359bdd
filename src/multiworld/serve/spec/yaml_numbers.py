"""Rules for the numbers in a spec: those of YAML 1.2. Pure."""

from __future__ import annotations

import re

INT = "tag:yaml.org,2002:int"
FLOAT = "tag:yaml.org,2002:float"
RESOLVERS = {
    INT: re.compile("[-+]?(0|[1-9][0-9_]*)$"),
    FLOAT: re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
}
