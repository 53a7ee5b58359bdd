"""A client whose controller is a table of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from multiworld.serve.controller.client import Service


class CannedService(Service):
    """A client that gets the same answer for each route, without a controller."""

    def __init__(self, answers: Mapping[str, object], status: int = 200) -> None:
        super().__init__(None, Path("none"))
        self._answers, self._status = answers, status
        self.asked: list[tuple[str, str, bytes | None]] = []

    def _exchange(
        self, method: str, target: str, body: bytes | None, limit_s: float
    ) -> tuple[int, bytes]:
        self.asked.append((method, target, body))
        return self._status, json.dumps(self._answers[target]).encode()
