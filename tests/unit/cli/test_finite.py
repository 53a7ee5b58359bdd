"""Numbers on the command line, which must be finite."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from multiworld.cli.tenants import tenants


@pytest.mark.parametrize(
    "words",
    [
        ["create", "a", "--weight", "nan"],
        ["create", "a", "--bytes-per-s", "1e400"],
        ["create", "a", "--bytes-per-s", "nan"],
        ["set", "a", "--weight", "inf"],
        ["rotate", "a", "--grace-s", "nan"],
    ],
)
def test_number_that_is_not_finite_is_a_mistake_in_the_command(
    words: list[str],
) -> None:
    done = CliRunner().invoke(tenants, words)
    assert done.exit_code == 2, done.output
    assert "is not a finite number" in done.output or "range" in done.output
