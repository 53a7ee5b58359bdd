"""Authentication of peers and encryption: a shared secret and TLS.

Programs pass a ``Security`` to a ``WorldManager`` or to a store, or set it through the
environment. The command line never does, because other users of the machine could read
the secret there.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multiworld.errors import ConfigError
from multiworld.net.file_version import version_of

__all__ = ["Security", "Tls"]

logger = logging.getLogger("multiworld.net")

# Minimum bytes of a secret. A recorded challenge and its answer allow guesses to be
# tested offline, so a secret must be long: ``openssl rand -hex 32`` makes a good one.
MINIMUM_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for links, data connections and sessions with the store.

    Both sides show a certificate, and ``authority`` must have signed both. Names in the
    certificates are not compared with addresses. TLS 1.3 only.

    Attributes:
        certificate: PEM file with this process's certificate (and chain).
        key: PEM file with its private key.
        authority: PEM file with the certificates of the trusted authorities.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Return the TLS context for one side of a connection.

        Args:
            is_server: True for the side that accepts the connection.

        Raises:
            ConfigError: A file cannot be read or is not a valid PEM file.
        """
        files = self.certificate, self.key, self.authority
        which = self, is_server
        try:
            found = _context(*which, tuple(map(version_of, files)))
        except ConfigError as error:
            if which not in _last:
                raise
            # The files may be in the middle of a renewal, with a certificate and a key
            # that do not match yet.
            logger.warning("the previous certificates stay in use: %s", error)
            return _last[which]
        _last[which] = found
        return found


_last: dict[tuple[Tls, bool], ssl.SSLContext] = {}  # the last valid contexts


@functools.lru_cache(maxsize=16)
def _context(
    tls: Tls, is_server: bool, versions: tuple[tuple[int, int], ...]
) -> ssl.SSLContext:
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    for name in ("certificate", "key", "authority"):
        path = getattr(tls, name)
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            rule = f"it cannot be read ({error.strerror}); give a PEM file"
            raise ConfigError(f"tls.{name}", str(path), rule) from error
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        context.load_verify_locations(tls.authority)
    except OSError as error:
        rule = f"it cannot be used with its key and its authority ({error}); give PEM "
        raise ConfigError(
            "tls.certificate", str(tls.certificate), rule + "files that belong together"
        ) from error
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Secret and certificates that connections must use.

    Attributes:
        secret: Secret shared by all members and the store; empty for none. Each side
            proves that it holds the secret; it is never sent.
        tls: Certificates; None switches TLS off. TLS encrypts everything except the
            heartbeats, which carry an HMAC instead.
        open_backends: Whether to allow a secret together with backends whose own data
            connections use neither secret nor TLS (``gloo``, ``nccl``). With TLS they
            are always refused: torch's wheels have no TLS for Gloo, and a world that
            is encrypted only in part is not encrypted.

    Raises:
        ConfigError: The secret is shorter than 16 bytes, or not ``bytes``.
    """

    secret: bytes = field(default=b"", repr=False)
    tls: Tls | None = None
    open_backends: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes):
            raise ConfigError("secret", "***", "give bytes, such as os.urandom(32)")
        if self.secret and len(self.secret) < MINIMUM_BYTES:
            rule = (
                f"{MINIMUM_BYTES} bytes or more (MULTIWORLD_SECRET, or the content of "
                "MULTIWORLD_SECRET_FILE; openssl rand -hex 32 makes one)"
            )
            raise ConfigError("secret", f"{len(self.secret)} bytes", rule)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Security:
        """Return the security that the environment asks for.

        The variables are ``MULTIWORLD_SECRET`` or ``MULTIWORLD_SECRET_FILE``;
        ``MULTIWORLD_TLS_CERT``, ``MULTIWORLD_TLS_KEY`` and ``MULTIWORLD_TLS_CA``; and
        ``MULTIWORLD_OPEN_BACKENDS`` ("1" allows them). A feature whose variables are
        not set is off.

        Args:
            environment: The environment variables.

        Raises:
            ConfigError: Two variables contradict each other, only some of those for TLS
                are set, a secret is empty or too short, or a file cannot be read.
        """
        return cls(
            secret=_secret_of(environment),
            tls=_tls_of(environment),
            open_backends=environment.get("MULTIWORLD_OPEN_BACKENDS", "") == "1",
        )

    def proof(self, role: str, *parts: object) -> str:
        """Return a proof that this process holds the secret.

        Args:
            role: Purpose of the proof; a proof for one role is invalid for any other.
            parts: JSON values that the proof covers.

        Returns:
            The HMAC (SHA-256) of role and parts, in hexadecimal.
        """
        text = json.dumps([role, *parts], sort_keys=True, separators=(",", ":"))
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, proof: object, role: str, *parts: object) -> bool:
        """Return whether a proof was made with the secret, in constant time.

        Args:
            proof: The received proof; any JSON value.
            role: Purpose of the proof, as for ``proof``.
            parts: JSON values that the proof must cover.
        """
        wanted = self.proof(role, *parts)
        return isinstance(proof, str) and hmac.compare_digest(
            proof.encode(errors="replace"), wanted.encode()
        )

    def check_backend(self, backend: str) -> None:
        """Check that a backend does not bypass the secret or TLS.

        Args:
            backend: Name of the backend.

        Raises:
            ConfigError: The backend's data connections would bypass one of them.
        """
        if backend in ("direct", "memory"):
            return
        if self.tls is not None:
            raise ConfigError(
                "backend",
                backend,
                "use 'direct' where TLS is on: torch's wheels cannot encrypt the data "
                "of other backends",
            )
        if self.secret and not self.open_backends:
            raise ConfigError(
                "backend",
                backend,
                "use 'direct' where a secret is set: this backend's own data "
                "connections do not check it. Security(open_backends=True), or "
                "MULTIWORLD_OPEN_BACKENDS=1, allows it on a network you trust",
            )


def _secret_of(environment: Mapping[str, str]) -> bytes:
    text = environment.get("MULTIWORLD_SECRET", "")
    file = environment.get("MULTIWORLD_SECRET_FILE", "")
    if text and file:
        rule = "set either this or MULTIWORLD_SECRET_FILE, not both"
        raise ConfigError("MULTIWORLD_SECRET", "...", rule)
    if "MULTIWORLD_SECRET" in environment and not text:
        rule = "it must not be empty; unset it for no secret"
        raise ConfigError("MULTIWORLD_SECRET", text, rule)
    if "MULTIWORLD_SECRET_FILE" in environment and not file and not text:
        rule = "it must not be empty; unset it for no secret"
        raise ConfigError("MULTIWORLD_SECRET_FILE", file, rule)
    if not file:
        try:
            return text.encode()
        except UnicodeEncodeError:
            rule = "it must be UTF-8; MULTIWORLD_SECRET_FILE may hold any bytes"
            raise ConfigError("MULTIWORLD_SECRET", "...", rule) from None
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        rule = f"give a readable file ({error})"
        raise ConfigError("MULTIWORLD_SECRET_FILE", file, rule) from error
    if not secret:
        raise ConfigError("MULTIWORLD_SECRET_FILE", file, "the file holds no secret")
    return secret


def _tls_of(environment: Mapping[str, str]) -> Tls | None:
    names = ("MULTIWORLD_TLS_CERT", "MULTIWORLD_TLS_KEY", "MULTIWORLD_TLS_CA")
    paths = [environment.get(name, "") for name in names]
    if not any(paths):
        return None
    for name, path in zip(names, paths, strict=True):
        if not path:
            raise ConfigError(name, path, f"set all of {', '.join(names)}, or none")
    certificate, key, authority = map(Path, paths)
    tls = Tls(certificate=certificate, key=key, authority=authority)
    tls.context(is_server=True)
    return tls
