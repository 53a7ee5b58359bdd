"""Model whose module asks whether there is a GPU when it is imported."""

from __future__ import annotations

import torch

from tests.serve import models

HAS_GPU = torch.cuda.is_available()
model = models.model
