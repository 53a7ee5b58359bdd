"""Inference: the workers of each world classify the images that the leader sends.

The model is the trained ResNet of ``serve/digits_resnet.py``, and the images are
scikit-learn's handwritten digits: pip install 'multiworld-elastic[demo]'
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "serve"))

from digits_resnet import (
    Digits,
    DigitsResNet,
    load_digits,
    load_model,
    trained_weights,
)

from common import run
from multiworld import World

BATCH = 8


@functools.cache
def prepare() -> tuple[DigitsResNet, Digits]:
    """Return the model, which the first call trains, and the test images."""
    torch.set_num_threads(1)
    training, test = load_digits()
    weights = trained_weights(training)
    return load_model(weights), test


@torch.inference_mode()
def classify(model: DigitsResNet, images: torch.Tensor) -> torch.Tensor:
    """Return the most likely digit of each image."""
    return model(images).argmax(dim=1)


async def step(world: World, number: int) -> str:
    """Classify one batch as a worker or, as the leader, send one to each worker."""
    model, test = prepare()
    if world.rank != 0:
        batch = await world.recv_bundle(src=0)
        # Computing on the event loop would hold up every other world on it.
        digits = await asyncio.to_thread(classify, model, batch.tensors["images"])
        await world.send(digits, dst=0)
        return f"classified {len(digits)} images"
    right = 0
    for rank in range(1, world.size):
        chosen = torch.arange(number * BATCH, (number + 1) * BATCH) % len(test.labels)
        await world.send_bundle({"images": test.images[chosen]}, dst=rank)
        right += int((await world.recv(src=rank) == test.labels[chosen]).sum())
    return f"{right} of {BATCH * (world.size - 1)} right"


if __name__ == "__main__":
    prepare()
    run(__doc__, step)
