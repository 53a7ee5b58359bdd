"""Handshakes with equal, different and missing secrets, and hellos of any version."""

from __future__ import annotations

import json

import msgspec
import pytest

from multiworld.net import frames
from multiworld.net.frames import PROTOCOL_VERSION
from multiworld.net.handshake import HandshakeError, accepting, decode_hello, dialing
from multiworld.net.handshake_messages import Answer, Hello, Proof
from multiworld.net.security import Security
from tests.wire import frame_of

SECRET = Security(secret=b"a secret long enough to be one")


OTHER = Security(secret=b"another that is long enough, too")


class Visit(Hello, frozen=True, tag_field="kind", tag="visit"):
    guest: str


visits = msgspec.json.Decoder[Hello](Visit)


def body_of(frame: bytes) -> bytes:
    """Return a frame without its length."""
    return frame[4:]


def shake(dialer: Security, acceptor: Security, *, heard: str = "me") -> None:
    """Pass frames until the handshake ends; the acceptor hears of guest ``heard``."""
    ours = dialing(Visit(guest="me"), dialer)
    hello = decode_hello(
        body_of(next(ours)).replace(b'"me"', b'"%s"' % heard.encode()), visits
    )
    theirs = accepting(hello, acceptor)
    try:
        frame = next(theirs)
        while True:
            frame = theirs.send(body_of(ours.send(body_of(frame))))
    except StopIteration as end:
        answer = end.value
    except HandshakeError as error:
        if error.answer is None:
            raise
        answer = error.answer
    with pytest.raises(StopIteration):
        ours.send(body_of(frames.encode(answer)))


def meet(frame: bytes) -> None:
    next(accepting(decode_hello(body_of(frame), visits), Security()))


def answer_of(**fields: object) -> bytes:
    return json.dumps({"multiworld": PROTOCOL_VERSION, **fields}).encode()


def test_equal_secrets_shake_hands() -> None:
    shake(SECRET, SECRET)
    shake(Security(), Security())


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(SECRET, OTHER), (SECRET, Security()), (Security(), SECRET)],
)
def test_different_secrets_are_refused_by_name(
    dialer: Security, acceptor: Security
) -> None:
    with pytest.raises(HandshakeError) as refused:
        shake(dialer, acceptor)
    assert refused.value.kind == "secret"


def test_proof_covers_the_purpose() -> None:
    """Nobody on the way may change the purpose of a connection."""
    with pytest.raises(HandshakeError) as refused:
        shake(SECRET, SECRET, heard="another")
    assert refused.value.kind == "secret"


def test_acceptor_without_the_secret_is_found_out() -> None:
    """An impostor in a member's place cannot prove that it holds the secret."""
    ours = dialing(Visit(guest="me"), SECRET)
    assert json.loads(body_of(next(ours)))["multiworld"] == PROTOCOL_VERSION
    proof = json.loads(body_of(ours.send(answer_of(challenge="00"))))
    assert set(proof) == {"proof"}
    with pytest.raises(HandshakeError, match="does not hold our secret"):
        ours.send(answer_of(ok=True, proof=proof["proof"]))


def test_acceptor_that_asks_for_no_secret_is_found_out() -> None:
    """An attacker cannot downgrade the handshake to one without a secret."""
    ours = dialing(Visit(guest="me"), SECRET)
    next(ours)
    with pytest.raises(HandshakeError, match="asks for no secret"):
        ours.send(answer_of(ok=True))


@pytest.mark.parametrize(
    "body",
    [b"garbage", b"[]", b'{"multiworld":"x"}', answer_of(ok=1), answer_of(challenge=5)],
)
def test_invalid_answer_is_a_frame_error(body: bytes) -> None:
    """Something other than a manager or a store listens there."""
    for security in (SECRET, Security()):
        ours = dialing(Visit(guest="me"), security)
        next(ours)
        with pytest.raises(frames.FrameError):
            ours.send(body)


@pytest.mark.parametrize("body", [b"garbage", b"[]", b'{"proof":1}', b'{"proof":null}'])
def test_invalid_proof_is_a_frame_error(body: bytes) -> None:
    """A missing proof is a wrong one."""
    hello = Visit(multiworld=PROTOCOL_VERSION, sealed=True, guest="me")
    theirs = accepting(hello, SECRET)
    next(theirs)
    with pytest.raises(frames.FrameError):
        theirs.send(body)
    theirs = accepting(hello, SECRET)
    next(theirs)
    with pytest.raises(HandshakeError, match="different secrets"):
        theirs.send(b"{}")


@pytest.mark.parametrize(
    ("hello", "theirs"),
    [
        ({}, 0),
        ({"multiworld": 2, "kind": "visit"}, 2),
        ({"multiworld": 2, "kind": "visit", "guest": "me"}, 2),
        ({"multiworld": 999, "kind": "new in a later release"}, 999),
        ({"multiworld": 999, "kind": "visit", "guest": ["a", "b"]}, 999),
    ],
)
def test_hello_of_another_version_is_distinguished_from_a_wrong_one(
    hello: dict[str, object], theirs: int
) -> None:
    """The hellos of other versions may look different, except for the number."""
    with pytest.raises(HandshakeError) as refused:
        meet(frame_of(hello))
    assert (refused.value.kind, refused.value.theirs) == ("version", theirs)
    answer = refused.value.answer
    assert answer is not None
    assert (answer.multiworld, answer.ok) == (PROTOCOL_VERSION, False)
    assert f"the dialer {theirs}" in answer.error


@pytest.mark.parametrize(
    "hello",
    [
        [],
        {"multiworld": "x", "kind": "visit", "guest": "me"},
        {"multiworld": PROTOCOL_VERSION},
        {"multiworld": PROTOCOL_VERSION, "kind": "visit"},
        {"multiworld": PROTOCOL_VERSION, "kind": "burglary", "guest": "me"},
        {"multiworld": PROTOCOL_VERSION, "kind": ["visit"], "guest": "me"},
        {"multiworld": PROTOCOL_VERSION, "kind": "visit", "guest": 1},
        {"multiworld": PROTOCOL_VERSION, "guest": "me", "sealed": "yes"},
    ],
)
def test_wrong_hello_of_this_version_is_a_frame_error(hello: object) -> None:
    with pytest.raises(frames.FrameError):
        decode_hello(body_of(frame_of(hello)), visits)


def test_messages_of_the_handshake_omit_empty_fields() -> None:
    """A refused peer learns the version and the reason."""
    said = json.loads(body_of(frames.encode(Answer(multiworld=1, error="no"))))
    assert said == {"multiworld": 1, "error": "no"}
    assert json.loads(body_of(frames.encode(Proof("p")))) == {"proof": "p"}
