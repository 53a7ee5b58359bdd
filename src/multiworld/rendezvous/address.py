"""Where a store is: ``tcp://host:port`` or ``memory://name``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from multiworld.errors import ConfigError

RULE = "'tcp://HOST:PORT', or 'memory://NAME' inside one process"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A parsed store address. ``port`` is 0 for a memory store."""

    scheme: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        if self.scheme == "memory":
            return f"memory://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True for a store inside this process."""
        return self.scheme == "memory"


def parse_store(text: str) -> StoreAddress:
    """Read a store address.

    Raises:
        ConfigError: It is not one; the message shows the two forms.
    """
    if not isinstance(text, str):
        raise ConfigError("store", text, RULE)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError("store", text, RULE) from error
    if parts.scheme == "memory" and parts.netloc:
        return StoreAddress("memory", parts.netloc)
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise ConfigError("store", text, RULE)
    return StoreAddress("tcp", parts.hostname, port)
