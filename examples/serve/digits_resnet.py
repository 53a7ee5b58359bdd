"""A small ResNet for 8x8 images of handwritten digits, and its training.

Shapes: B batch, C channels, H and W pixels. Images are [B, 1, 8, 8] float32 in 0..1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VERSION = 1
"""Part of the weight file's name; raise it when the model or its training changes."""

EPOCHS = 12
"""Passes over the training images."""

BATCH = 64
"""Images in one step of the training."""

TEST_SHARE = 0.3
"""Share of the images that is kept for the test."""


class Block(nn.Module):
    """Residual block: two 3x3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels_out)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features [B, channels_out, H / stride, W / stride]."""
        y = functional.relu(self.first_norm(self.first(x_BCHW)))
        y = self.second_norm(self.second(y))
        return functional.relu(y + self.around(x_BCHW))


class DigitsResNet(nn.Module):
    """Three blocks and a linear layer: 74,666 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 1, 8, 8]."""
        features: Tensor = self.blocks(x_BCHW).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


@dataclass(frozen=True, slots=True)
class Digits:
    """Images [N, 1, 8, 8] float32 and their labels [N] int64."""

    images: Tensor
    labels: Tensor


def load_digits() -> tuple[Digits, Digits]:
    """Return scikit-learn's handwritten digits: the training set, and the test set.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, labels = load(return_X_y=True)
    parts = train_test_split(
        images, labels, test_size=TEST_SHARE, random_state=0, stratify=labels
    )
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    return _digits(train_x, train_y), _digits(test_x, test_y)


def _digits(images: Tensor, labels: Tensor) -> Digits:
    return Digits(images.float().view(-1, 1, 8, 8) / 16, labels.long())


def train(digits: Digits) -> DigitsResNet:
    """Train a network from scratch; takes a few seconds on two cores."""
    torch.manual_seed(0)
    model = DigitsResNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = EPOCHS * -(-len(digits.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(digits.labels)), BATCH):
            logits = model(digits.images[chosen])
            loss = functional.cross_entropy(logits, digits.labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


def trained_weights(digits: Digits) -> Path:
    """Return the file of trained weights; the first call trains them."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "multiworld" / f"digits-resnet-v{VERSION}.pt"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    torch.save(train(digits).state_dict(), draft)
    draft.replace(path)  # atomic: a concurrent reader sees a complete file or none
    return path


def load_model(path: Path) -> DigitsResNet:
    """Return the model with the weights in ``path``, in evaluation mode."""
    model = DigitsResNet()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()
