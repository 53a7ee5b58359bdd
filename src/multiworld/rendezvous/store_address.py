"""Addresses of stores: ``tcp://host:port`` (one or more), ``memory://name``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from multiworld.errors import ConfigError

# The valid forms of an address, for error texts.
RULE = (
    "use 'tcp://HOST:PORT', several of them separated by commas (members use the first "
    "that answers), or 'memory://NAME' within one process"
)

MAX_STORES = 8  # maximum number of addresses in one list


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Parsed address; ``place`` is its number in the list, and the list's length."""

    scheme: str
    host: str
    port: int = 0
    place: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        if self.scheme == "memory":
            return f"memory://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        return self.scheme == "memory"


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """One or more stores that serve a world, in order of preference."""

    stores: tuple[StoreAddress, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.stores))

    @property
    def is_local(self) -> bool:
        return self.stores[0].is_local


def parse_store(text: str) -> StoreAddresses:
    """Return the addresses in ``text``, which commas separate."""
    if not isinstance(text, str):
        raise ConfigError("store", text, RULE)
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_STORES or len(set(parts)) < len(parts):
        raise ConfigError(
            "store", text, f"give at most {MAX_STORES} different addresses"
        )
    places = [(number, len(parts)) for number in range(len(parts))]
    stores = tuple(
        _parse_one(part, place, text) for part, place in zip(parts, places, strict=True)
    )
    if len(stores) > 1 and any(store.is_local for store in stores):
        raise ConfigError("store", text, RULE)
    return StoreAddresses(stores)


def _parse_one(part: str, place: tuple[int, int], text: str) -> StoreAddress:
    try:
        url = urlsplit(part)
        port = url.port
        if url.scheme == "tcp":
            # Raises if the name is invalid; a lookup would raise UnicodeError later.
            (url.hostname or "").encode("idna")
    except ValueError as error:
        raise ConfigError("store", text, RULE) from error
    if url.scheme == "memory" and url.netloc:
        return StoreAddress("memory", url.netloc)
    if url.scheme != "tcp" or not url.hostname or not port:
        raise ConfigError("store", text, RULE)
    return StoreAddress("tcp", url.hostname, port, place)
