"""A worker as programs for pymultiworld 0.1 are written: it runs here unchanged."""

import argparse
import asyncio

import torch

from multiworld.world_manager import WorldManager

SIZE = (4,)


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world")
    parser.add_argument("--port", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    manager = WorldManager(enable_monitor=True)
    await manager.initialize_world(
        args.world, 1, 2, backend="gloo", addr="127.0.0.1", port=args.port
    )
    communicator = manager.communicator
    for step in range(args.steps):
        try:
            await communicator.send(torch.ones(SIZE) * step, 0, args.world)
        except Exception as error:
            print(f"worker of {args.world}: {error}", flush=True)
            break
        await asyncio.sleep(0.01)
    manager.cleanup()


if __name__ == "__main__":
    loop = asyncio.get_event_loop()
    loop.run_until_complete(main())
