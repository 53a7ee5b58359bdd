"""Worker of the demo: joins its world and classifies the leader's images."""

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
    """Return the most likely digit of each image: [B, 1, 8, 8] to [B] int64."""
    logits: Tensor = model(images)
    return logits.argmax(dim=1)


async def work(world_name: str, store: str, backend: str, weights: Path) -> None:
    """Answer the leader until it leaves or is lost.

    Args:
        world_name: World to join, as rank 1 of 2.
        store: Address of the store.
        backend: Backend of the world.
        weights: File of trained weights.

    Raises:
        SystemExit: The world broke.

    Cancellation:
        Leaves the world.
    """
    model = load_model(weights)
    async with WorldManager() as manager:
        world = await manager.join(
            world_name, rank=1, size=2, store=store, backend=backend
        )
        try:
            while True:
                batch = await world.recv_bundle(src=0)
                # Computing on the event loop would hold up every other world on it.
                digits = await asyncio.to_thread(
                    classify, model, batch.tensors["images"]
                )
                await world.send_bundle({"digits": digits}, meta=batch.meta, dst=0)
        except MemberLeftError:
            pass  # the leader is done
        except WorldBrokenError as error:
            raise SystemExit(f"worker of {world_name}: {error}") from error


def main() -> None:
    """Run one worker, as the arguments say."""
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
