"""A worker of the demo: joins its world, and classifies what the leader sends."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import torch
from torch import Tensor

from multiworld import MemberLeftError, WorldBrokenError, WorldManager
from multiworld.demo.worlds.model import DigitsResNet, load_model


@torch.inference_mode()
def classify(model: DigitsResNet, images: Tensor) -> Tensor:
    """Return the most likely digit of each image [B, 1, 8, 8], as [B] int64."""
    logits: Tensor = model(images)
    return logits.argmax(dim=1)


async def work(world_name: str, store: str, backend: str, weights: Path) -> None:
    """Answer until the leader leaves or is lost."""
    model = load_model(weights)
    async with WorldManager() as manager:
        world = await manager.join(
            world_name, rank=1, size=2, store=store, backend=backend
        )
        try:
            while True:
                batch = await world.recv_bundle(src=0)
                # Never compute on the loop: other worlds live there.
                digits = await asyncio.to_thread(
                    classify, model, batch.tensors["images"]
                )
                await world.send_bundle({"digits": digits}, meta=batch.meta, dst=0)
        except MemberLeftError:
            pass  # the leader is done
        except WorldBrokenError as error:
            raise SystemExit(f"worker of {world_name}: {error}") from error


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(description=work.__doc__)
    parser.add_argument("--world", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--backend", default="direct")
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(work(args.world, args.store, args.backend, args.weights))


if __name__ == "__main__":
    main()
