"""ResNet for handwritten digits in two stages, and a client for it.

    cd examples/serve
    multiworld serve digits.yaml       # in one terminal
    python digits.py                   # in another: send the test images
    multiworld chaos kill digits head  # in a third, meanwhile

``digits.yaml`` names the factory ``model`` below. ``digits_uncut.yaml`` names the
factory ``uncut``, and multiworld cuts the network. Images are [rows, 1, 8, 8] float32.
"""

from __future__ import annotations

import argparse
import json
import urllib.request

from digits_resnet import load_digits, load_model, trained_weights
from torch import nn

from multiworld.serve import Model, Module, Stage, StageContext, Tensors, TensorSpec


class Blocks:
    """First stage: the convolutions, from images to features [rows, 64]."""

    def __init__(self, blocks: nn.Module) -> None:
        self._blocks = blocks

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the features of the images."""
        return {"features": self._blocks(tensors["image"]).mean(dim=(2, 3))}


def load_blocks(context: StageContext) -> Blocks:
    """Load the convolutions of the trained network."""
    path = trained_weights(load_digits()[0])
    return Blocks(load_model(path).blocks.to(context.device))


class Head:
    """Second stage: the linear layer, from features to logits [rows, 10]."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the logits of the features."""
        return {"logits": self._head(tensors["features"])}


def load_head(context: StageContext) -> Head:
    """Load the linear layer of the trained network."""
    path = trained_weights(load_digits()[0])
    return Head(load_model(path).head.to(context.device))


def model() -> Model:
    """Return the network in two stages."""
    return Model(
        stages=[
            Stage(name="blocks", load=load_blocks),
            Stage(name="head", load=load_head),
        ],
        inputs=[TensorSpec("image", "FP32", (-1, 1, 8, 8))],
        outputs=[TensorSpec("logits", "FP32", (-1, 10))],
    )


def uncut() -> Module:
    """Return the whole network, which ``digits_uncut.yaml`` cuts in two."""
    return Module(
        make=load_whole,
        inputs=[TensorSpec("image", "FP32", (-1, 1, 8, 8))],
        outputs=[TensorSpec("logits", "FP32", (-1, 10))],
    )


def load_whole() -> nn.Module:
    """Load the trained network."""
    path = trained_weights(load_digits()[0])
    return load_model(path)


def main() -> None:
    """Send the test images to a running service, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    _, test = load_digits()
    right = 0
    for images, labels in zip(test.images.split(8), test.labels.split(8), strict=True):
        body = {
            "name": "image",
            "datatype": "FP32",
            "shape": list(images.shape),
            "data": images.flatten().tolist(),
        }
        request = urllib.request.Request(
            f"{given.url}/v2/models/digits/infer",
            data=json.dumps({"inputs": [body]}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            logits = json.load(answer)["outputs"][0]["data"]
        rows = [logits[n : n + 10] for n in range(0, len(logits), 10)]
        found = [row.index(max(row)) for row in rows]
        right += sum(a == b for a, b in zip(found, labels.tolist(), strict=True))
    print(f"accuracy {right / len(test.labels):.3f} of {len(test.labels)} images")


if __name__ == "__main__":
    main()
