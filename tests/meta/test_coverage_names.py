"""Names that ``make coverage`` does not count."""

from __future__ import annotations

import tomllib

from tests.meta.coverage_table import EXCLUDED, ROOT


def test_modules_that_are_not_counted_exist() -> None:
    """``coverage_table`` refuses unknown names, but after half an hour of tests."""
    for name in tomllib.loads(EXCLUDED.read_text()):
        module = name.partition(":")[0].replace(".", "/")
        path = ROOT / "src" / "multiworld" / module
        assert path.is_dir() or path.with_suffix(".py").exists(), name
