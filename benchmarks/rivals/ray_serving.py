"""Three stages on Ray Serve, composed as its documentation does. Needs ``ray[serve]``.

Arguments: the kind of the stages, a port, and the replicas of each stage. The script
prints "ready" and serves until its standard input ends. Stages of the kind ``empty``
return their number, those of the kind ``slow`` do so after 50 ms, and those of the kind
``minilm`` are the same parts of the model that multiworld serves.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

BATCH = 16  # maximum inputs of a batch, the same as in our stages


@serve.deployment(max_ongoing_requests=64)
class Empty:
    """Returns its input."""

    async def __call__(self, value: float) -> float:
        return value


@serve.deployment(max_ongoing_requests=64)
class Slow:
    """Returns its input after 50 ms."""

    async def __call__(self, value: float) -> float:
        await asyncio.sleep(0.05)
        return value


@serve.deployment(max_ongoing_requests=64)
class Part:
    """A part of the sentence encoder; computes all waiting requests as one batch."""

    def __init__(self, number: int, stages: int) -> None:
        import torch

        from multiworld.demo import minilm
        from multiworld.serve.spec.stage import StageContext

        torch.set_num_threads(1)
        stage = minilm.model(stages).stages[number]
        self._function, self._ragged = stage.load(StageContext()), stage.ragged

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.0)
    async def __call__(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        import torch

        longest = max(self._length(one) for one in given)
        batch = {
            name: torch.cat([self._padded(name, one[name], longest) for one in given])
            for name in given[0]
        }
        with torch.inference_mode():
            found = self._function(batch)
        return [
            {
                name: (
                    t[row : row + 1, : self._length(one)]
                    if name in self._ragged
                    else t[row : row + 1]
                ).numpy()
                for name, t in found.items()
            }
            for row, one in enumerate(given)
        ]

    def _length(self, tensors: dict[str, Any]) -> int:
        return max(a.shape[1] for name, a in tensors.items() if name in self._ragged)

    def _padded(self, name: str, given: Any, longest: int) -> Any:
        import torch

        tensor = torch.from_numpy(given)
        if name not in self._ragged or tensor.dim() < 2:
            return tensor
        padding = (0, 0) * (tensor.dim() - 2) + (0, longest - tensor.shape[1])
        return torch.nn.functional.pad(tensor, padding, value=self._ragged[name])


@serve.deployment(max_ongoing_requests=256)
class EmptyIngress:
    """Sends a number through three stages."""

    def __init__(self, *stages: Any) -> None:
        self._stages = stages

    async def __call__(self, request: Request) -> dict[str, Any]:
        value = (await request.json())["inputs"][0]["data"][0]
        for stage in self._stages:
            value = stage.remote(value)
        return {"outputs": [{"data": [await value]}]}


@serve.deployment(max_ongoing_requests=256)
class TextIngress:
    """Sends a text through the stages of the encoder."""

    def __init__(self, *stages: Any) -> None:
        from multiworld.demo import minilm

        text = minilm.model(len(stages)).text
        assert text is not None
        self._text, self._stages = text(), stages

    async def __call__(self, request: Request) -> dict[str, Any]:
        encoded = self._text.encode((await request.json())["input"])
        value: Any = {name: tensor.numpy() for name, tensor in encoded.items()}
        for stage in self._stages:
            value = stage.remote(value)
        row = (await value)["embedding"][0].tolist()
        return {"data": [{"embedding": row}]}


def main() -> None:
    """Serve one kind of pipeline until standard input ends."""
    kind, port, replicas = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.WARNING)
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    if kind != "minilm":
        stage = Empty if kind == "empty" else Slow
        app = EmptyIngress.bind(
            *(
                stage.options(name=f"{kind}{n}", num_replicas=replicas).bind()
                for n in range(3)
            )
        )
    else:
        app = TextIngress.bind(
            *(Part.options(name=f"part{n}").bind(n, 3) for n in range(3))
        )
    serve.run(app)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.shutdown()


if __name__ == "__main__":
    main()
