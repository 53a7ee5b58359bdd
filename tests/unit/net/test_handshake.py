"""Handshakes with equal, different and missing secrets."""

from __future__ import annotations

import pytest

from multiworld.net.handshake import HandshakeError, accepting, dialing
from multiworld.net.security import Security

SECRET = Security(secret=b"a secret long enough to be one")


OTHER = Security(secret=b"another that is long enough, too")


def shake(dialer: Security, acceptor: Security) -> None:
    """Pass frames between both sides until the handshake is complete."""
    ours = dialing({"kind": "link"}, dialer)
    theirs = accepting(next(ours), acceptor)
    answer = None
    try:
        message = next(theirs)
        while True:
            message = theirs.send(ours.send(message))
    except StopIteration as end:
        answer = end.value
    except HandshakeError as error:
        if error.answer is None:
            raise
        answer = error.answer
    with pytest.raises(StopIteration):
        ours.send(answer)


def test_equal_secrets_shake_hands() -> None:
    """So do two sides without a secret."""
    shake(SECRET, SECRET)
    shake(Security(), Security())


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(SECRET, OTHER), (SECRET, Security()), (Security(), SECRET)],
)
def test_different_secrets_are_refused_by_name(
    dialer: Security, acceptor: Security
) -> None:
    """The dialer learns that the secret is the reason."""
    with pytest.raises(HandshakeError) as refused:
        shake(dialer, acceptor)
    assert refused.value.kind == "secret"


def test_acceptor_without_the_secret_is_found_out() -> None:
    """An impostor in a member's place cannot prove that it holds the secret."""
    ours = dialing({"kind": "link"}, SECRET)
    version = next(ours)["multiworld"]
    proof = ours.send({"multiworld": version, "challenge": "00"})
    assert set(proof) == {"proof"}
    with pytest.raises(HandshakeError, match="does not hold our secret"):
        ours.send({"multiworld": version, "ok": True, "proof": proof["proof"]})


def test_acceptor_that_asks_for_no_secret_is_found_out() -> None:
    """An attacker cannot downgrade the handshake to one without a secret."""
    ours = dialing({"kind": "link"}, SECRET)
    version = next(ours)["multiworld"]
    with pytest.raises(HandshakeError, match="asks for no secret"):
        ours.send({"multiworld": version, "ok": True})
