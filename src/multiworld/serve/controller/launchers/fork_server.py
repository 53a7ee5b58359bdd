"""Fork server: imports a service's modules once, and forks its processes.

It runs as ``python -m`` this module, with arguments FD MODULES..., and takes orders
from the socket FD.

Importing torch and a model's code takes seconds, a fork about 10 ms. A service's first
fork server is a fork of the controller, which has already imported most modules. The
fork server has a single thread, because a fork copies only one, and runs no torch
operation, because torch's thread pool would hang in every child. If a module starts a
thread, the fork server exits, and another one without that module replaces it. The fork
server exits with its parent; the forked processes keep running.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from setproctitle import setproctitle

from multiworld.serve.controller.launchers import protocol
from multiworld.serve.engine.models.imported_sources import note_preloaded
from multiworld.serve.machines.leash import open_leash, wear_leash
from multiworld.serve.machines.open_files import raise_limit

# Checks for the exit of an ending thread: maximum number, seconds between them.
GONE_LOOKS, GONE_S = 20, 0.01


class ForkServer:
    def __init__(self, control: socket.socket, *, has_modules: bool) -> None:
        self._control, self._has_modules = control, has_modules
        self._inbox = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Fork processes until the controller closes the socket."""
        self._send(protocol.Warm(os.getpid()))
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, *key.data)
                elif not self._read():
                    return

    def _read(self) -> bool:
        data = self._control.recv(1 << 20)
        self._inbox += data
        while b"\n" in self._inbox:
            line, _, self._inbox = self._inbox.partition(b"\n")
            match protocol.FORK_ORDERS.decode(line):
                case protocol.Launch() as order:
                    if not self._launch(order):
                        return False
                case protocol.Ping():
                    self._send(protocol.Pong())
        return bool(data)

    def _send(self, news: protocol.ForkNews) -> None:
        try:
            self._control.sendall(protocol.encode(news))
        except OSError:
            pass  # the next read notices that the socket is closed

    def _launch(self, order: protocol.Launch) -> bool:
        """Fork a process; return whether this server can fork more processes."""
        name = order.name
        threads = count_threads()
        if threads != 1 and has_more_threads(1):
            error = (
                f"the fork server has {threads} threads, so it cannot fork; a module "
                "that the model imports starts one"
            )
            self._send(protocol.LaunchFailed(name, error))
            if self._has_modules:
                self._send(protocol.Threaded(""))
            return not self._has_modules
        leash = None
        try:
            # Open the leash before the reply, because the sender may release it
            # afterwards.
            leash = open_leash(order.leash) if order.leash else None
            pid = os.fork()
        except OSError as error:
            if leash is not None:
                os.close(leash)
            self._send(protocol.LaunchFailed(name, str(error)))
            return True
        if pid == 0:
            self._child(order, leash)
        if leash is not None:
            os.close(leash)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (name, pid))
        self._send(protocol.Launched(name, pid))
        return True

    def _reap(self, pidfd: int, name: str, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._send(protocol.Exited(name, code))

    def _child(self, order: protocol.Launch, leash: int | None) -> None:
        """Run the ordered process in the forked child; never return."""
        code = 1
        try:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            if leash is not None:
                wear_leash(leash)
            _settle(order)
            main = importlib.import_module(
                "multiworld.serve.controller.launchers.entry"
            ).main
            code = main(order.args)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # e.g. the disk is full
                    stream.flush()
            os._exit(code)


def _redirect(path: str, *, keeps_output: bool = True) -> None:
    """Redirect stdin to /dev/null, and the output to ``path`` (empty: unchanged).

    If ``path`` cannot be opened, the output stays as it is, or is dropped.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if path:
        try:
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:  # e.g. the disk is full: serve without a log
            with contextlib.suppress(OSError):
                os.write(2, f"cannot open {path}: {error.strerror}\n".encode())
            if keeps_output:
                return
            log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _settle(order: protocol.Launch) -> None:
    """Give a forked process its own session, log and random seeds."""
    os.setsid()
    _redirect(order.log)
    os.environ.update(order.env)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def has_more_threads(before: int) -> bool:
    """Return whether new threads remain; a joined thread may vanish a moment later."""
    for _ in range(GONE_LOOKS):
        if count_threads() <= before:
            return False
        time.sleep(GONE_S)
    return True


class WaitingServer(NamedTuple):
    """A forked fork server that waits for ``Begin``; exits when the socket closes."""

    pid: int
    control: socket.socket


def fork_waiting() -> WaitingServer | None:
    """Fork a fork server from this process; return None if it has several threads."""
    if count_threads() != 1:
        return None
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if pid:
        theirs.close()
        return WaitingServer(pid, ours)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours.close()
        _close_inherited()
        _begin(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _close_inherited() -> None:
    """Close inherited descriptors, such as a lock of the controller's parent."""
    # The processes of a service outlive the controller, so they must not hold such a
    # lock. ``subprocess`` closes inherited descriptors itself; ``os.fork`` does not.
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number > 2 and os.get_inheritable(number):
                os.close(number)
        except OSError:
            pass  # this was the descriptor of the listing, closed by now


def _begin(control: socket.socket) -> None:
    line = b""
    while not line.endswith(b"\n"):
        data = control.recv(1 << 20)
        if not data:
            return
        line += data
    begin = protocol.FORK_BEGIN.decode(line)
    # Not the controller's output, which this process and its children outlive.
    _redirect(begin.log, keeps_output=False)
    os.environ.update(begin.env)
    _serve(control, begin.modules)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        _serve(control, sys.argv[2:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # do not wait for a thread that an imported module has started


def _serve(control: socket.socket, modules: Sequence[str]) -> None:
    setproctitle("multiworld fork server")
    # Ignore Ctrl-C in the terminal: the controller handles it, and closes the socket,
    # which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_limit()
    threads = count_threads()
    for module in modules:
        try:
            note_preloaded(importlib.import_module(module))
        except Exception:
            # Continue: only processes that need the module will fail.
            traceback.print_exc()
        if has_more_threads(threads):
            control.sendall(protocol.encode(protocol.Threaded(module)))
            return  # ``main`` then ends the process
    gc.collect()
    gc.freeze()
    ForkServer(control, has_modules=bool(modules)).run()


if __name__ == "__main__":
    main()
