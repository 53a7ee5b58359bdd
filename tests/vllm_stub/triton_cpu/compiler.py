"""The compiler of the backend, which is never asked to compile."""

from __future__ import annotations

from typing import Any

from triton.backends import compiler


class CpuBackend(compiler.BaseBackend):  # type: ignore[misc]
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "cpu"

    def parse_options(self, options: Any) -> Any:
        return options

    def add_stages(self, *given: Any) -> None:
        pass

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
