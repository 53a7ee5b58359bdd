"""Checks of the fields of ``WorldConfig``."""

from __future__ import annotations

from typing import Any

import pytest

from multiworld import ConfigError, WorldConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("join_s", 0),
        ("silence_s", -1),
        ("close_s", 0.0),
        ("operation_s", 0),
        ("eager_bytes", -1),
        ("unexpected_bytes", -5),
        ("max_message_bytes", -1),
        ("heartbeat", "fork"),
        ("host_p2p", "gloo"),
        ("silence_s", "2"),
        ("silence_s", float("nan")),
        ("join_s", None),
        ("join_s", True),
        ("join_s", 1e8),
        ("join_s", float("inf")),
        ("operation_s", 1e12),
        ("close_s", float("inf")),
        ("eager_bytes", 1.5),
        ("payload_checksum", "no"),
    ],
)
def test_config_when_value_is_bad_then_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        WorldConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.rule


def test_replace_checks_again() -> None:
    """A copy must not bypass the checks."""
    assert WorldConfig().replace(silence_s=5).silence_s == 5
    with pytest.raises(ConfigError):
        WorldConfig().replace(silence_s=0)
