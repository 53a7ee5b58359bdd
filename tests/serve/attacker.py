"""Client process that sends one request again and again."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from pathlib import Path


def send_once(where: tuple[str, int], content: bytes) -> str:
    """Send the request; return the status of the answer, or "closed"."""
    with socket.create_connection(where, timeout=40.0) as sock:
        # The server may answer and close before it has read all.
        with contextlib.suppress(OSError):
            sock.sendall(content)
        try:
            head = sock.recv(4096)
        except OSError:
            head = b""
    return head.split()[1].decode() if head else "closed"


def main() -> None:
    """Send a file, COUNT at once, until standard input ends; print the statuses."""
    host, port, path, count = sys.argv[1:]
    content = Path(path).read_bytes()
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    statuses: Counter[str] = Counter()

    def attack() -> None:
        while not is_over.is_set():
            statuses[send_once((host, int(port)), content)] += 1

    threads = [threading.Thread(target=attack) for _ in range(int(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    main()
