"""Store addresses."""

from __future__ import annotations

import pytest

from multiworld import ConfigError
from multiworld.rendezvous.store_address import parse_store


@pytest.mark.parametrize(
    "text",
    [
        "tcp://10.0.0.1:29500",
        "tcp://[::1]:80",
        "tcp://host:1",
        "memory://x",
        "memory://a..b",
        "memory://" + 70 * "a",
    ],
)
def test_valid_address_is_shown_as_it_was_read(text: str) -> None:
    assert str(parse_store(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "tcp://host",
        "tcp://:80",
        "tcp://h:99999",
        "tcp://a..b:1",
        "tcp://" + 64 * "a" + ":1",
        "udp://h:1",
        "memory://",
    ],
)
def test_bad_address_is_refused_with_the_two_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse_store(text)
