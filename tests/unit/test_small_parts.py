"""Small pure parts that others stand on."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.liveness import heartbeat_helper
from multiworld.liveness.early_messages import KEPT_S, LIMIT, EarlyMessages
from multiworld.liveness.heartbeat_helper import Beat, Target, decode_beat, encode_beat
from multiworld.net.handshake import HandshakeError, accepting, dialing
from multiworld.net.refusals import Refusals
from multiworld.net.security import Security
from multiworld.rendezvous.epoch_file import EpochFile
from multiworld.world.rejoin import FIRST_S, LAST_S, pause_s

KEY = bytes(range(32))
SECRET = Security(secret=b"a secret long enough to be one")
OTHER = Security(secret=b"another that is long enough, too")


# Pauses.


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_and_end(failures: int, chance: float) -> None:
    """Never longer than the longest, never less than half the shortest."""
    assert FIRST_S / 2 <= pause_s(failures, chance) <= LAST_S
    assert pause_s(failures + 1, chance) >= pause_s(failures, chance)


# Beats.


beats = st.builds(
    Beat,
    st.sampled_from([heartbeat_helper.RUNNING, heartbeat_helper.STOPPED]),
    st.sampled_from([heartbeat_helper.WAITING, heartbeat_helper.COMPUTING]),
    st.integers(1, 2**60),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@given(beats, st.integers(0, heartbeat_helper.FRAME_BYTES * 8 - 1))
def test_beat_arrives_whole_or_not_at_all(beat: Beat, bit: int) -> None:
    """A damaged or foreign one is none."""
    frame = encode_beat(beat, KEY)
    got = decode_beat(frame, KEY)
    for name in Beat.__slots__:
        assert getattr(got, name) == getattr(beat, name)
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    for wrong, key in ((bytes(damaged), KEY), (frame, bytes(32))):
        with pytest.raises(ValueError, match="beat"):
            decode_beat(wrong, key)


def beat(sequence: int) -> Beat:
    """Return a beat with nothing special."""
    return Beat(heartbeat_helper.RUNNING, heartbeat_helper.WAITING, sequence, 0, 0)


def test_torn_frames_and_garbage_cost_only_themselves() -> None:
    """A helper that was replaced in the middle of a frame, say."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = Target(ours, bytes(32), KEY)
        theirs.sendall(encode_beat(beat(1), KEY)[:10] + encode_beat(beat(2), KEY))
        assert target.read(1.0)
        theirs.sendall(b"garbage" * 30 + encode_beat(beat(3), KEY))
        theirs.sendall(encode_beat(beat(4), KEY))
        assert target.read(2.0)
        assert target.latest is not None
        assert target.latest.sequence == 4
        assert target.heard_at == 2.0


def test_old_beat_does_not_count_again() -> None:
    """A copy of one that was recorded proves no life."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = Target(ours, bytes(32), KEY)
        recorded = encode_beat(beat(7), KEY)
        theirs.sendall(recorded)
        target.read(1.0)
        theirs.sendall(recorded)
        target.read(9.0)
        assert target.heard_at == 1.0


# Messages that came early.


def test_early_messages_wait_for_their_incarnation_and_place() -> None:
    """In order; once; not for ever; not without limit."""
    early = EarlyMessages[str, int]()
    for number in range(3):
        early.keep(1, "a", number, 0.0)
    early.keep(1, "b", 9, 0.0)
    early.keep(2, "a", 8, 0.0)
    assert early.take(1, "a") == [0, 1, 2]
    assert early.take(1, "a") == []
    early.drop(1)
    assert early.take(1, "b") == []
    early.purge(KEPT_S + 1)
    assert early.take(2, "a") == []
    for number in range(LIMIT + 10):
        early.keep(3, "a", number, 0.0)
    assert len(early.take(3, "a")) == LIMIT


# Handshakes.


def shake(dialer: Security, acceptor: Security) -> None:
    """Let both halves talk to each other until they are done."""
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
    """Or none on either side."""
    shake(SECRET, SECRET)
    shake(Security(), Security())


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(SECRET, OTHER), (SECRET, Security()), (Security(), SECRET)],
)
def test_different_secrets_are_refused_by_name(
    dialer: Security, acceptor: Security
) -> None:
    """And the dialer learns that it is the secret."""
    with pytest.raises(HandshakeError) as refused:
        shake(dialer, acceptor)
    assert refused.value.kind == "secret"


def test_acceptor_without_the_secret_is_found_out() -> None:
    """Whoever took a member's place cannot prove itself."""
    ours = dialing({"kind": "link"}, SECRET)
    version = next(ours)["multiworld"]
    proof = ours.send({"multiworld": version, "challenge": "00"})
    assert set(proof) == {"proof"}
    with pytest.raises(HandshakeError, match="does not hold our secret"):
        ours.send({"multiworld": version, "ok": True, "proof": proof["proof"]})


def test_acceptor_that_asks_for_no_secret_is_found_out() -> None:
    """No downgrade."""
    ours = dialing({"kind": "link"}, SECRET)
    version = next(ours)["multiworld"]
    with pytest.raises(HandshakeError, match="asks for no secret"):
        ours.send({"multiworld": version, "ok": True})


# Refusals and epochs.


def test_refusals_are_all_counted_and_few_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A port scanner must not fill the log."""
    caplog.set_level(logging.WARNING)
    refusals = Refusals(logging.getLogger("multiworld.test"), "the door")
    for number in range(500):
        refusals.add("malformed", ("10.0.0.1", number), "garbage")
    refusals.add("secret", ("10.0.0.1", 1), "wrong")
    assert refusals.counts == {"malformed": 500, "secret": 1}
    assert len(caplog.records) == 2


def test_epochs_outlast_a_restart(tmp_path: Path) -> None:
    """Only the highest counts, and a torn line costs only itself."""
    path = tmp_path / "epochs"
    memory = EpochFile(path)
    for epoch in (1, 3, 2):
        memory.remember("w", epoch)
    memory.remember("x y\n", 7)
    memory.close()
    with path.open("a") as file:
        file.write('{"world": "z", "ep')
    again = EpochFile(path)
    assert again.epochs() == {"w": 3, "x y\n": 7}
    again.close()
    assert len(path.read_text().splitlines()) == 2
