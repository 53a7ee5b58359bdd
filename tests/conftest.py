"""What all tests share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # a pool that starts in the middle of a test looks like a leak
