"""A helper process for tests: ``python -m … FD WORD`` does what the word says."""

from __future__ import annotations

import os
import signal
import socket
import sys

from multiworld.serve.controller.launchers.protocol import Exited, Pong, Warm, encode


def main() -> None:
    control, word = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if word == "ends":
        os.write(2, b"why it ended\n")
        return
    if word == "hangs":
        signal.pause()
    control.sendall(encode(Warm(os.getpid())))
    if word == "breaks off":
        control.sendall(b'{"kind": "Exi')
        return
    if word == "talks":
        control.sendall(b"nonsense\n")
    if word == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    received = b""
    while data := control.recv(1 << 16):
        received += data
        *lines, received = received.split(b"\n")
        for line in lines:
            if b'"Ping"' in line:
                if word != "is deaf":
                    control.sendall(encode(Pong()))
                continue
            said = os.environ.get("WORD", "") + line.decode()
            control.sendall(encode(Exited(said, len(line))))
            if b"end now" in line:
                return


if __name__ == "__main__":
    main()
