"""Who may come in: a shared secret, TLS, and where they come from.

A ``Security`` is given to a ``WorldManager`` and to the store, or read from the
environment. It is never taken from a command line, where other users of the machine
could read it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiworld.errors import ConfigError

__all__ = ["Security", "Tls"]

MINIMUM_BYTES = 16
"""Shortest secret: what answers a challenge can be tried out offline by whoever saw
one, so a secret must be too long to guess. ``openssl rand -hex 32`` makes a good
one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for links, data connections and sessions with the store.

    Both sides show theirs, and both must be signed by ``authority``; names in them are
    not compared with addresses. TLS 1.3 only.

    Attributes:
        certificate: PEM file with this process's certificate (and chain).
        key: PEM file with its private key.
        authority: PEM file with the certificates of who may sign.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Return the context for one side.

        Raises:
            ConfigError: A file cannot be read or is not what it should be.
        """
        return _context(self, is_server)


@functools.lru_cache(maxsize=16)
def _context(tls: Tls, is_server: bool) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.authority)
    except OSError as error:
        raise ConfigError("tls", str(tls), f"readable PEM files ({error})") from error
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What a connection must show before it is listened to.

    Attributes:
        secret: Shared by all members and the store; empty: nobody has to show one.
            Each side proves that it holds it, and it is never sent.
        tls: Encrypts everything but the heartbeats, which are sealed instead.
        open_backends: Allow backends whose own data connections know neither secret
            nor TLS (``gloo``, ``nccl``) beside a secret. With TLS they are refused in
            any case: torch's wheels have no TLS for Gloo, and a world that is encrypted
            in part is not.

    Raises:
        ConfigError: The secret is shorter than 16 bytes.
    """

    secret: bytes = field(default=b"", repr=False)
    tls: Tls | None = None
    open_backends: bool = False

    def __post_init__(self) -> None:
        """Check the secret."""
        if self.secret and len(self.secret) < MINIMUM_BYTES:
            rule = (
                f"{MINIMUM_BYTES} bytes or more (MULTIWORLD_SECRET, or the content of "
                "MULTIWORLD_SECRET_FILE; openssl rand -hex 32 makes one)"
            )
            raise ConfigError("secret", f"{len(self.secret)} bytes", rule)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Security:
        """Read ``MULTIWORLD_SECRET`` or ``MULTIWORLD_SECRET_FILE``, and
        ``MULTIWORLD_TLS_CERT``, ``MULTIWORLD_TLS_KEY``, ``MULTIWORLD_TLS_CA``, and
        ``MULTIWORLD_OPEN_BACKENDS``; what is not set is not asked for.

        Raises:
            ConfigError: Two of them contradict each other, or a file cannot be read.
        """
        return cls(
            secret=_secret_of(environment),
            tls=_tls_of(environment),
            open_backends=environment.get("MULTIWORLD_OPEN_BACKENDS", "") == "1",
        )

    def proof(self, role: str, *parts: object) -> str:
        """Return what only a holder of the secret can say about ``parts``."""
        text = json.dumps([role, *parts], sort_keys=True, separators=(",", ":"))
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, proof: object, role: str, *parts: object) -> bool:
        """Tell whether ``proof`` was made with the secret; takes equal time always."""
        wanted = self.proof(role, *parts)
        return isinstance(proof, str) and hmac.compare_digest(
            proof.encode(), wanted.encode()
        )

    def check_backend(self, backend: str) -> None:
        """Check that a backend does not undo what was asked for.

        Raises:
            ConfigError: Its data would go around secret or TLS.
        """
        if backend in ("direct", "memory"):
            return
        if self.tls is not None:
            raise ConfigError(
                "backend",
                backend,
                "'direct' where TLS is on: torch's wheels cannot encrypt the data of "
                "other backends, and they are not mixed",
            )
        if self.secret and not self.open_backends:
            raise ConfigError(
                "backend",
                backend,
                "'direct' where a secret is set: this backend's own data connections "
                "do not ask for it. Security(open_backends=True), or "
                "MULTIWORLD_OPEN_BACKENDS=1, allows it on a network you trust",
            )


def _secret_of(environment: Mapping[str, str]) -> bytes:
    text = environment.get("MULTIWORLD_SECRET", "")
    file = environment.get("MULTIWORLD_SECRET_FILE", "")
    if text and file:
        rule = "not set together with MULTIWORLD_SECRET_FILE"
        raise ConfigError("MULTIWORLD_SECRET", "...", rule)
    if "MULTIWORLD_SECRET" in environment and not text:
        rule = "not empty: unset it where no secret is wanted"
        raise ConfigError("MULTIWORLD_SECRET", text, rule)
    if not file:
        return text.encode()
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        rule = f"a readable file ({error})"
        raise ConfigError("MULTIWORLD_SECRET_FILE", file, rule) from error
    if not secret:
        raise ConfigError("MULTIWORLD_SECRET_FILE", file, "a file with a secret in it")
    return secret


def _tls_of(environment: Mapping[str, str]) -> Tls | None:
    names = ("MULTIWORLD_TLS_CERT", "MULTIWORLD_TLS_KEY", "MULTIWORLD_TLS_CA")
    paths = [environment.get(name, "") for name in names]
    if not any(paths):
        return None
    for name, path in zip(names, paths, strict=True):
        if not path:
            raise ConfigError(name, path, f"a PEM file; {', '.join(names)} go together")
    certificate, key, authority = map(Path, paths)
    tls = Tls(certificate=certificate, key=key, authority=authority)
    tls.context(is_server=True)
    return tls


def describe(security: Security) -> dict[str, Any]:
    """Return what is asked for, without the secret, for people."""
    return {"secret": bool(security.secret), "tls": security.tls is not None}
