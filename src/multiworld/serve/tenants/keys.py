"""API keys and their digests.

Only digests are stored. A plain SHA-256 suffices: slow hashes protect passwords that
can be guessed, but a key has 256 random bits, unless an operator chooses it.
"""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "mw"
GIVEN = "given-"  # prefix of the ids of keys that an operator chooses
MIN_GIVEN = 16  # minimum characters of a key that an operator chooses
ID_BYTES, SECRET_BYTES = 6, 32
KEY_PATTERN = re.compile(rf"{PREFIX}-([0-9a-f]{{{2 * ID_BYTES}}})-[A-Za-z0-9_-]{{43}}")
KEY_ID = re.compile(rf"(?:{GIVEN})?[0-9a-f]{{{2 * ID_BYTES}}}")


def make_key() -> tuple[str, str, str]:
    """Return a new key, its id and its digest; only its owner may see the key."""
    key_id = secrets.token_hex(ID_BYTES)
    key = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    return key, key_id, digest_of(key)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def check_given(key: str) -> None:
    """Raise ValueError for a chosen key that is easily guessed or cannot be sent."""
    if len(key) < MIN_GIVEN or not re.fullmatch(r"[!-~]+", key):
        raise ValueError(
            f"a key must have {MIN_GIVEN} or more printable ASCII characters, and no "
            "spaces"
        )


def known_as(text: str) -> tuple[str, str]:
    """Return the id and the digest of a key, also of one that an operator chose."""
    key_id, digest = parse_key(text)
    return key_id or f"{GIVEN}{digest[: 2 * ID_BYTES]}", digest


def parse_key(text: str) -> tuple[str, str]:
    """Return a key's id (empty unless ``make_key`` made the key) and its digest."""
    found = KEY_PATTERN.fullmatch(text)
    return found.group(1) if found else "", digest_of(text)
