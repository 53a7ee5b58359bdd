"""Form and encoding of the messages between the processes of a service. Pure.

Each message is a declared type, ``[name, field, …]`` on the wire. New fields are
appended with a default, and the previous release ignores them. A release rejects
messages that it does not know (``MessageError``). Messages from and to the controller
are text: the protocol version, then JSON. Messages between gateways and replicas travel
in ``frames``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from multiworld import errors
from multiworld.errors import InternalError, ServeError

PROTOCOL = 1  # version of these messages; a process also understands the previous one

UNDERSTOOD = (str(PROTOCOL - 1), str(PROTOCOL))

# Name of a gateway, number of a request there, and number of the attempt.
Key = tuple[str, int, int]
# The first two parts of a ``Key``, which all attempts share.
StreamId = tuple[str, int]

M = TypeVar("M")


class MessageError(InternalError):
    """A message has another protocol version, or is unknown to this release."""


MAX_TEXT = 4000  # maximum characters of an error text


def check_version(version: int | str) -> None:
    """Raise ``MessageError`` unless this process understands the version."""
    if str(version) not in UNDERSTOOD:
        shown = version if isinstance(version, int) else version[:20]
        raise MessageError(
            f"a message of protocol version {shown!r} arrived; this process "
            f"understands {' and '.join(UNDERSTOOD)}: use the same or adjacent releases"
        )


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message; the name of its type is its tag."""


class RemoteError(msgspec.Struct, frozen=True, array_like=True):
    """A ``ServeError`` of another process; ``stage`` is empty if no stage raised it."""

    kind: str
    text: str
    stage: str = ""
    param: str = ""  # of an ``InvalidRequestError``
    code: str = ""

    @staticmethod
    def of(error: ServeError) -> RemoteError:
        """Return an error as a message; truncate its text, which may be a model's."""
        # The error may be of a subclass that the model defines.
        names = (each.__name__ for each in type(error).__mro__)
        kind = next(name for name in names if hasattr(errors, name))
        given = (getattr(error, name, "") for name in ("stage", "param", "code"))
        # A model may set these attributes to anything.
        facts = (_sendable(each) if isinstance(each, str) else "" for each in given)
        return RemoteError(kind, _sendable(wording_of(error)), *facts)

    def error(self) -> ServeError:
        """Return the error to raise: a plain ``ServeError`` if its kind is unknown."""
        kind = getattr(errors, self.kind, ServeError)
        if not (isinstance(kind, type) and issubclass(kind, ServeError)):
            kind = ServeError
        error: ServeError = kind(self.text)
        for name in ("stage", "param", "code"):
            if value := getattr(self, name):
                error.__dict__[name] = value
        return error


def wording_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # raised by a model's own ``__str__``
        return "(its text cannot be shown)"


def _sendable(text: str) -> str:
    """Truncate a text, and replace characters that UTF-8 cannot encode."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}..."
    return text.encode("utf-8", "replace").decode()


FRAMES = 1  # tag of the frames of an edge
NOTHING = 2  # tag that is never sent, so a receive with it ends only with the edge


class Codec(Generic[M]):
    """Encoder and decoder of messages of type ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(kind)

    def encode(self, message: M) -> str:
        """Return a message as text, for ``World.send_object``."""
        return f"{PROTOCOL} {_ENCODER.encode(message).decode()}"

    def decode(self, text: object) -> M:
        """Return the message; raise ``MessageError`` if unknown or malformed."""
        version, _, body = str(text).partition(" ")
        check_version(version)
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise MessageError(f"message {body[:80]!r}: {error}") from None


_ENCODER = msgspec.json.Encoder()
