"""A leader as programs for pymultiworld 0.2 are written: it runs here unchanged."""

import argparse
import asyncio

import torch

from multiworld.communicator import BrokenWorldException
from multiworld.manager import WorldManager

SIZE = (4,)


async def receive(communicator, world_name, rank):
    count = 0
    while True:
        tensor = torch.zeros(SIZE)
        try:
            await communicator.recv(tensor, rank, world_name)
        except Exception as error:
            print(f"{world_name}: caught {type(error).__name__}: {error}", flush=True)
            assert isinstance(error, BrokenWorldException) or "left" in str(error)
            assert communicator.is_broken(world_name)
            break
        count += 1
        if count % 50 == 0:
            print(f"{world_name}: received {count} {tensor.tolist()}", flush=True)
    print(f"{world_name}: done after {count}", flush=True)


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, nargs="+")
    args = parser.parse_args()
    manager = WorldManager()
    communicator = manager.communicator
    names = [f"world{i}" for i in range(1, len(args.ports) + 1)]
    await asyncio.gather(
        *(
            manager.initialize_world(
                name, 0, 2, backend="gloo", addr="127.0.0.1", port=port
            )
            for name, port in zip(names, args.ports)
        )
    )
    print("initialized", flush=True)
    tasks = [asyncio.create_task(receive(communicator, name, 1)) for name in names]
    await asyncio.gather(*tasks)
    for name in names:
        manager.remove_world(name)
    manager.cleanup()
    print("end", flush=True)


if __name__ == "__main__":
    loop = asyncio.get_event_loop()
    loop.run_until_complete(main())
