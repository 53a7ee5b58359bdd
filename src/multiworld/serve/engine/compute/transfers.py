"""Copies between the host and the device of a stage. Token ids, positions, indices and
masks are uploaded; hidden states, logits and cached keys and values are downloaded.
Everything else stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies to and from one device; on the CPU nothing is copied."""

    device: torch.device

    @property
    def is_host(self) -> bool:
        return self.device.type == "cpu"

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_host else tensor.to(self.device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host; wait until it is computed."""
        return tensor if self.is_host else tensor.to("cpu")


HOST = Transfers(torch.device("cpu"))  # for stages on the CPU
