"""``multiworld chat``, with a fake service."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from multiworld.cli.main import cli


class Service(BaseHTTPRequestHandler):
    """Answers with the pieces of ``said``, and records requests in ``asked``."""

    said: ClassVar[list[Any]] = []
    asked: ClassVar[list[Any]] = []
    models: ClassVar[list[Any]] = []
    needed: ClassVar[str | None] = None

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.headers["authorization"] != self.needed:
            self._answer(401, b'{"error": {"message": "a key is needed"}}')
            return
        self._answer(200, json.dumps({"data": self.models}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.asked.append(json.loads(self.rfile.read(length)))
        if self.said == ["refused"]:
            self._answer(404, b'{"error": {"message": "no such model"}}')
            return
        events = [
            part if isinstance(part, dict) else {"choices": [{"delta": part_of(part)}]}
            for part in self.said
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def part_of(text: str) -> dict[str, str]:
    return {"content": text}


@pytest.fixture
def url() -> Iterator[str]:
    Service.said, Service.asked, Service.needed = ["Hel", "lo"], [], None
    Service.models = [{"id": "encoder"}, {"id": "m", "max_model_len": 64}]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_keeps_what_was_said(url: str) -> None:
    found = CliRunner().invoke(cli, ["chat", "--url", url], input="Hi\n\nAnd?\n")
    assert found.exit_code == 0, found.output
    assert found.stdout == "Hello\nHello\n"
    first, second = Service.asked
    assert first["model"] == "m"
    assert [m["content"] for m in second["messages"]] == ["Hi", "Hello", "And?"]


def test_error_of_the_service_is_shown(url: str) -> None:
    Service.said = ["refused"]
    found = CliRunner().invoke(cli, ["chat", "m", "--url", f"{url}/v1"], input="Hi\n")
    assert found.exit_code == 1
    assert "no such model" in found.output


def test_key_is_asked_for_by_its_option(url: str) -> None:
    Service.needed = "Bearer k"
    found = CliRunner().invoke(cli, ["chat", "--url", url], input="Hi\n")
    assert "a key is needed; give it with --key" in found.output
    env = {"MULTIWORLD_API_KEY": "k"}
    found = CliRunner().invoke(cli, ["chat", "--url", url], input="Hi\n", env=env)
    assert found.stdout == "Hello\n", found.output


def test_error_within_a_stream_is_shown(url: str) -> None:
    Service.said = ["Hel", {"error": {"message": "no replica"}}]
    found = CliRunner().invoke(cli, ["chat", "m", "--url", url], input="Hi\n")
    assert found.exit_code == 1
    assert "no replica" in found.output


def test_service_without_such_models_is_named(url: str) -> None:
    Service.models = [{"id": "encoder"}]
    found = CliRunner().invoke(cli, ["chat", "--url", url], input="Hi\n")
    assert found.exit_code == 1
    assert "generates text" in found.output


def test_service_that_is_not_there_is_named() -> None:
    found = CliRunner().invoke(
        cli, ["chat", "--url", "http://127.0.0.1:1"], input="x\n"
    )
    assert found.exit_code == 1
    assert "http://127.0.0.1:1" in found.output
    assert "no service answers" in found.output
    assert "--url" in found.output


def test_unknown_model_is_named_before_the_first_message(url: str) -> None:
    found = CliRunner().invoke(cli, ["chat", "x", "--url", url], input="")
    assert found.exit_code == 1
    assert "no model 'x'" in found.output
    assert "there: encoder, m" in found.output


def test_only_service_of_this_user_is_found(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        def __init__(self, app: str | None, state: object) -> None:
            pass

        def ask(self, method: str, path: str, kind: type) -> Any:
            return type("Status", (), {"url": url})

    monkeypatch.setattr("multiworld.cli.chat.Service", Found)
    found = CliRunner().invoke(cli, ["chat"], input="Hi\n")
    assert found.stdout == "Hello\n", found.output


def test_line_that_is_not_utf8_is_sent_all_the_same(url: str) -> None:
    found = CliRunner().invoke(cli, ["chat", "--url", url], input=b"caf\xe9\n")
    assert found.exit_code == 0, found.output
    assert Service.asked[0]["messages"][0]["content"] == "caf\ufffd"


@pytest.mark.parametrize("models", [[5], [{"name": "m"}]])
def test_address_of_something_else_is_named(url: str, models: list[Any]) -> None:
    Service.models = models
    found = CliRunner().invoke(cli, ["chat", "--url", url], input="Hi\n")
    assert found.exit_code == 1
    assert "does not answer as OpenAI's API does" in found.output


@pytest.mark.timeout(60)
def test_ctrl_c_at_the_prompt_ends_the_chat(url: str) -> None:
    """Although a thread waits for a line."""
    command = [sys.executable, "-m", "multiworld.cli.main", "chat", "--url", url]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    try:
        said = b""
        while not said.endswith(b"> "):
            said += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal is gone
            while said := os.read(terminal, 4096):
                pass
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1
