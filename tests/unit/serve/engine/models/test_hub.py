"""Models on the hub: fetched once, from a server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from multiworld.errors import SpecError
from multiworld.serve.engine.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle, which nobody needs",
}

PROGRAM = """
import sys
from multiworld.errors import SpecError
from multiworld.serve.engine.models import hub
try:
    print(hub.folder_of(sys.argv[1], sys.argv[2]))
except SpecError as error:
    print("SpecError:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that fetching a model needs."""

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        bodies = {
            f"/api/models/some/model/revision/{COMMIT}": {
                "id": "some/model",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in FILES],
            },
            f"/api/models/some/model/tree/{COMMIT}": [
                {"type": "file", "path": name, "size": len(content), "oid": "0"}
                for name, content in FILES.items()
            ],
        }
        if path in bodies:
            self._send(json.dumps(bodies[path]).encode(), has_body=has_body)
            return
        name = path.removeprefix(f"/some/model/resolve/{COMMIT}/")
        if name in FILES:
            self._send(FILES[name], has_body=has_body)
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, *, has_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if has_body:
            self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def fetched(endpoint: str, cache: Path, name: str = "some/model") -> str:
    """Return what another process prints, since the library reads its settings once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, COMMIT],
        env={
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache),
            "MULTIWORLD_CACHE": str(cache / "ours"),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=100.0,
        check=True,
    )
    return done.stdout.strip()


def test_model_is_fetched_once_and_then_found_offline(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    folder = Path(fetched(endpoint, tmp_path))
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert fetched("http://127.0.0.1:9", tmp_path) == str(folder)


def test_files_that_another_program_fetched_are_completed(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """Another program may have fetched only a tokenizer."""
    endpoint = f"http://127.0.0.1:{server.server_port}"
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "snapshots" / COMMIT / "tokenizer.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert fetched("http://127.0.0.1:9", tmp_path) == str(
        repository / "snapshots" / COMMIT
    )
    folder = Path(fetched(endpoint, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert fetched("http://127.0.0.1:9", tmp_path) == str(folder)


def test_model_that_cannot_be_fetched_is_named(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    text = fetched(endpoint, tmp_path, "some/other")
    assert text.startswith("SpecError: cannot fetch some/other at 0123")


def test_error_without_a_text_is_named_by_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*args: object, local_files_only: bool = False, **more: object) -> str:
        raise LocalEntryNotFoundError("no") if local_files_only else TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", silent)
    with pytest.raises(SpecError, match=r"from the hub: TimeoutError\(\)"):
        hub.folder_of("some/model", COMMIT)


def test_hub_name_needs_a_revision_and_a_folder_has_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="add `revision:` with a commit"):
        hub.folder_of("some/model", None)
    with pytest.raises(SpecError, match="is a path on disk; remove `revision:`"):
        hub.folder_of(str(tmp_path), "main")
    assert hub.folder_of(str(tmp_path), None) == str(tmp_path)
    assert not hub.is_hub_name("~/models/x")
