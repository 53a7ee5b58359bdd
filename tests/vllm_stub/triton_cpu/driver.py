"""The driver of the backend: a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends import driver
from triton.backends.compiler import GPUTarget


class CpuDriver(driver.DriverBase):  # type: ignore[misc]
    def __init__(self) -> None:
        """Look for no device."""

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "void*"

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., float]:
        def measure(call: Callable[[], Any], **options: Any) -> float:
            call()
            return 1.0

        return measure

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu
