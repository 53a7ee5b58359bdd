"""A stand-in for ``launchers.entry`` in a fork server, whose processes do little."""

from __future__ import annotations

import json
import os
import signal
import sys
import types


def main(text: str) -> int:
    what = json.loads(text)["name"]
    signal.alarm(60)
    if what == "waits":
        signal.pause()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.write(1, f"{os.environ['GREETING']} {os.getpid()} {os.getsid(0)}\n".encode())
    signal.sigwait({signal.SIGTERM})
    if what == "raises":
        raise KeyError("as asked")
    return 7


_module = types.ModuleType("multiworld.serve.controller.launchers.entry")
_module.main = main  # type: ignore[attr-defined]
sys.modules[_module.__name__] = _module
