"""Usage of a process and its children, while they live and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from multiworld.serve.machines.usage import (
    MEMORY_S,
    MemoryKills,
    Usage,
    UsageReader,
    memory_above,
    memory_of,
    usage_of,
)

MIB = 2**20


@contextmanager
def running(*lines: str) -> Iterator[int]:
    code = "\n".join(
        ["import os, sys", *lines, "print('ready', flush=True)", "sys.stdin.read()"]
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


def test_memory_that_was_not_written_does_not_count() -> None:
    """A process is charged for what it occupies, not for what it reserved."""
    with running("import mmap; m = mmap.mmap(-1, 256 << 20)") as pid:
        assert 0 < memory_of(pid) < 64 * MIB


def test_file_pages_do_not_count(tmp_path: object) -> None:
    """The kernel can drop mapped weights at any time."""
    path = f"{tmp_path}/weights"
    with open(path, "wb") as file:
        file.write(bytes(64 * MIB))
    lines = (
        f"import mmap; f = open({path!r}, 'rb')",
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); sum(m[::4096])",
    )
    with running(*lines) as pid:
        assert memory_of(pid) < 48 * MIB


def test_memory_of_children_counts() -> None:
    """A replica may start processes of its own."""
    lines = (
        "r, w = os.pipe()",
        "if os.fork() == 0:",
        "    a = bytearray(b'x' * (64 << 20)); os.write(w, b'x'); sys.stdin.read()",
        "    os._exit(0)",
        "os.read(r, 1)",
    )
    with running(*lines) as pid:
        assert memory_of(pid) >= 64 * MIB
        assert usage_of(pid).memory_bytes >= 64 * MIB


def test_memory_shared_after_a_fork_is_counted_once() -> None:
    """Parent and child are each charged for a part."""
    lines = (
        "a = bytearray(b'x' * (64 << 20))",
        "if os.fork() == 0:",
        "    sys.stdin.read(); os._exit(0)",
    )
    with running(*lines) as pid:
        assert 64 * MIB <= memory_of(pid) < 120 * MIB
        # The cheap bound counts it twice; the exact count decides.
        assert memory_above(pid, 120 * MIB) is None


def test_out_of_memory_kills_are_reported_once() -> None:
    counts = iter([4, 4, 5, 5])
    kills = MemoryKills(lambda: next(counts))
    assert [kills.grew() for _ in range(3)] == [False, True, False]


def test_limit_is_reported_with_what_is_used() -> None:
    with running("a = bytearray(b'x' * (32 << 20))") as pid:
        used = memory_above(pid, 8 * MIB)
        assert used is not None
        assert used >= 32 * MIB
        assert memory_above(pid, used * 2) is None


def test_process_time_counts() -> None:
    busy = "while sum(os.times()[:2]) < 0.2: pass"
    with running(busy) as pid:
        assert usage_of(pid).cpu_s >= 0.19


def test_exited_process_uses_nothing() -> None:
    with running() as pid:
        pass
    assert usage_of(pid) == Usage(0.0, 0)
    assert memory_of(pid) == 0
    assert memory_above(pid, 0) is None


def test_zombie_uses_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert memory_of(process.pid) == 0
    process.wait()


@pytest.mark.parametrize(
    "name", ["a b) S 1 2", "))))", pytest.param("\\n x", id="newline")]
)
def test_name_of_the_process_does_not_matter(name: str) -> None:
    """Linux writes the name unescaped into a line that is split at blanks."""
    with running(f"open('/proc/self/comm', 'w').write({name!r})") as pid:
        assert 0 <= usage_of(pid).cpu_s < 60
        assert memory_of(pid) > 0


def test_name_that_is_cut_within_a_letter_does_not_matter() -> None:
    """Linux keeps 15 bytes of a name, whatever they mean."""
    with running("open('/proc/self/comm', 'wb').write('é'.encode() * 9)") as pid:
        assert usage_of(pid).memory_bytes > 0


GROWS = """import threading, time
held = []
def grow():
    while True:
        held.append(b"x" * 2**20)
        time.sleep(0.005)
threading.Thread(target=grow, daemon=True).start()
"""


def test_memory_is_read_seldom_and_processor_time_always() -> None:
    now = 0.0
    with running(GROWS) as pid:
        reader = UsageReader(pid, lambda: now)
        first = reader.read()
        assert first.memory_bytes > 0
        while (found := reader.read()).cpu_s <= first.cpu_s + 0.02:
            assert found.memory_bytes == first.memory_bytes
        now = MEMORY_S
        assert reader.read().memory_bytes > first.memory_bytes
