"""Stages of a cut ``nn.Module``, which together compute what the whole does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve import Module, StageContext, TensorSpec
from multiworld.serve.engine.models.meter import BatchMeter, measured_stages
from multiworld.serve.engine.models.modules import cut_module
from multiworld.serve.engine.models.partition import Part, cut
from multiworld.serve.engine.models.tracing import Cutter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Skipping(nn.Module):
    """A module with a row count, a skip and an early output that cross cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.shape[0]
        hidden = skip = self.stem(x)
        early = skip.mean((1, 2, 3))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden + skip + torch.arange(8, dtype=hidden.dtype)
        return self.head(hidden.mean((2, 3))).view(rows, 2, 5), early


class Text(nn.Module):
    """A module for rows of any length, with two inputs and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(16, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + 0.01 * torch.arange(ids.shape[1]).unsqueeze(-1)
        hidden = self.encoder(x, src_key_padding_mask=mask == 0)
        return {"logits": self.out(hidden[:, 0])}


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


IMAGE = TensorSpec("image", "FP32", (-1, 3, 8, 8))
SKIPPING: dict[str, Any] = {
    "make": Skipping,
    "inputs": [IMAGE],
    "outputs": [TensorSpec("a", "FP32", (-1, 2, 5)), TensorSpec("b", "FP32", (-1,))],
}
TEXT: dict[str, Any] = {
    "make": Text,
    "inputs": [
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("mask", "INT64", (-1, -1)),
    ],
    "outputs": [TensorSpec("logits", "FP32", (-1, 5))],
}
CHAIN: dict[str, Any] = {
    "make": chain,
    "inputs": [TensorSpec("x", "FP32", (-1, 4))],
    "outputs": [TensorSpec("y", "FP32", (-1, 3))],
}


def shared() -> nn.Module:
    """Return a chain that has one of its modules several times."""
    act = nn.ReLU()
    return nn.Sequential(
        nn.Linear(4, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3), act
    )


class Residual(nn.Sequential):
    """A chain that computes more than its children."""

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = nn.Sequential(*self)(x)
        return whole + 10.0 * x[:, :3]


def residual() -> nn.Module:
    return Residual(*chain().children())


def data(name: str, rows: int) -> tuple[Tensor, ...]:
    if name == "text":
        mask = torch.ones((rows, 4 + rows), dtype=torch.int64)
        mask[0, 2:] = 0
        return torch.randint(0, 50, mask.shape), mask
    is_image = name == "skipping"
    return (torch.randn((rows, 3, 8, 8) if is_image else (rows, 4)),)


def listed(found: Any) -> list[Tensor]:
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, tuple) else [found]


CASES = {
    "skipping": SKIPPING,
    "text": TEXT,
    "chain": CHAIN,
    "shared": {**CHAIN, "make": shared},
    "residual": {**CHAIN, "make": residual},
}


HEAVY = {("text", 2, False), ("text", 3, False), ("text", 2, True)}
"""Cases whose tracing takes seconds; similar cases cover most of them."""


@pytest.mark.parametrize(
    ("name", "stages", "has_file"),
    [
        pytest.param(*case, marks=[pytest.mark.heavy] if case in HEAVY else [])
        for case in itertools.product(CASES, (1, 2, 3), (True, False))
    ],
)
def test_stages_together_are_the_module(
    name: str, stages: int, has_file: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    case: dict[str, Any] = CASES[name]
    whole = case["make"]().eval()
    if has_file:
        file = tmp_path / "weights.safetensors"
        save_file(whole.state_dict(), file)
        case = {**case, "weights": str(file)}
    else:
        state = whole.state_dict()

        def make(build: Callable[[], nn.Module] = case["make"]) -> nn.Module:
            made = build()
            made.load_state_dict(state)
            return made

        case = {**case, "make": make}
    model = cut_module(Module(**case), stages)
    with torch.inference_mode():
        functions = [stage.load(StageContext()) for stage in model.stages]
        sizes = [sum(p.numel() for p in f.parameters()) for f in functions]  # type: ignore[attr-defined]
        assert sum(sizes) == sum(p.numel() for p in whole.parameters())
        assert min(sizes) > 0
        for rows in (1, 2, 5):
            given = data(name, rows)
            tensors = dict(zip((s.name for s in case["inputs"]), given, strict=True))
            for function in functions:
                tensors = function(tensors)
                assert all(t.shape[0] == rows for t in tensors.values())
            wanted = listed(whole(*given))
            assert list(tensors) == [spec.name for spec in case["outputs"]]
            for value, right in zip(tensors.values(), wanted, strict=True):
                torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)


def test_parts_are_measured_and_the_cut_is_applied() -> None:
    model = cut_module(Module(**SKIPPING), 2)
    assert model.parts is not None
    whole = model.parts()
    parts = measured_stages(BatchMeter(whole, [1], 2), len(whole.stages))
    assert [part.name for part in parts] == [
        "stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head",
    ]  # fmt: skip
    assert all(part.weight_bytes > 0 for part in parts)
    begins = cut([Part(part.seconds[1]) for part in parts], 2).begins[1:]
    stages = cut_module(Module(**SKIPPING), 2, begins).stages
    second = stages[1].load(StageContext())
    names = {name for name, _ in second.named_parameters()}  # type: ignore[attr-defined]
    assert any(parts[begins[0]].name in name for name in names)
    assert not any("stem" in name for name in names)


class Deciding(nn.Module):
    """A module that branches on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() < 1 else x
        return x


class Totalling(Deciding):
    """A module with a tensor without rows that crosses the cut."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.layers[0](x).sum()
        x = self.layers[2](self.layers[1](x) * total)
        return x


class Twice(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return x, x  # type: ignore[return-value]


ROW = TensorSpec("x", "FP32", (-1, 4))


@pytest.mark.parametrize(
    ("options", "stages", "cut", "reason"),
    [
        ({"make": Deciding}, 2, None, "traced with a dynamic number of rows"),
        ({"make": Totalling}, 2, [1], "is not the number of input rows"),
        ({"make": Twice}, 2, [1], "one tensor twice"),
        ({"make": chain, "inputs": [IMAGE]}, 2, None, "cannot be run on its example"),
        ({"make": chain}, 9, None, "cannot be cut into 9"),
        ({"make": chain}, 2, [7], "there are 5 parts"),
        ({"make": lambda: 3}, 2, None, "returned a int"),
        ({"make": chain, "weights": "/nowhere"}, 2, None, "/nowhere"),
    ],
)
def test_module_that_cannot_be_cut_is_reported(
    options: dict[str, Any], stages: int, cut: list[int] | None, reason: str
) -> None:
    made = Module(**{"inputs": [ROW], "outputs": [ROW], **options})
    stage = cut_module(made, stages, cut).stages[0]
    with pytest.raises(SpecError, match=reason):
        stage.load(StageContext())


class Branching(nn.Module):
    """A module that computes something else for more than eight positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x.shape[1] > 8:
            hidden = hidden * 2
        summed: Tensor = self.second(hidden).sum(1)
        return summed / x.shape[1]


@pytest.mark.parametrize(
    ("traced", "right", "wrong"),
    [(None, (1, 4, 8), (9, 20)), (20, (9, 30), (1, 8)), (1, (1,), (2, 9))],
)
def test_size_that_would_take_another_branch_is_refused(
    traced: int | None, right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    """It would silently take the branch of the example."""
    whole = Branching().eval()
    cutter = Cutter(
        Module(
            make=lambda: whole,
            inputs=[TensorSpec("x", "FP32", (-1, -1, 4))],
            outputs=[TensorSpec("y", "FP32", (-1, 4))],
            example=None if traced is None else lambda: {"x": torch.ones(1, traced, 4)},
        ),
        2,
    )
    parts = [cutter.load(number, "cpu") for number in (0, 1)]
    for size in right:
        x = torch.randn(2, size, 4)
        found = parts[1](parts[0]({"x": x}))["y"]
        torch.testing.assert_close(found, whole(x))
    for size in wrong:
        with pytest.raises(InvalidRequestError, match="it was traced with an example"):
            parts[0]({"x": torch.randn(2, size, 4)})


def test_inconsistent_descriptions_are_reported() -> None:
    with pytest.raises(SpecError, match="needs inputs= and outputs="):
        cut_module(Module(make=chain, inputs=[], outputs=[ROW]), 2)
    with pytest.raises(SpecError, match="ragged= is for a Module of one stage"):
        cut_module(Module(**CHAIN, ragged={"x": 0}), 2)
    for wrong in ([2, 1], [0], [1, 1]):
        with pytest.raises(SpecError, match="must name the first parts"):
            cut_module(Module(**CHAIN), len(wrong) + 1, wrong)


class Tied(nn.Module):
    """A module whose head shares the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.body(self.embed(x).mean(1))))
        return found


@pytest.mark.parametrize("left_out", ["", "head.weight", "embed.weight"])
def test_tied_weights_reach_all_of_their_holders(left_out: str, tmp_path: Path) -> None:
    """The file may have them under one name only."""
    torch.manual_seed(3)
    whole = Tied().eval()
    state = {name: t.clone() for name, t in whole.state_dict().items()}
    state.pop(left_out, None)
    save_file(state, tmp_path / "model.safetensors")
    inputs = [TensorSpec("x", "INT64", (-1, 4))]
    outputs = [TensorSpec("y", "FP32", (-1, 32))]
    weights = str(tmp_path)
    module = Module(make=Tied, inputs=inputs, outputs=outputs, weights=weights)
    (stage,) = cut_module(module, 1).stages
    ids = torch.randint(32, (3, 4))
    with torch.inference_mode():
        found: Any = stage.load(StageContext())({"x": ids})
        torch.testing.assert_close(found["y"], whole(ids))


def test_weight_missing_in_the_file_is_reported(tmp_path: Path) -> None:
    state = chain().state_dict()
    del state["2.bias"]
    save_file(state, tmp_path / "model.safetensors")
    model = cut_module(Module(**CHAIN, weights=str(tmp_path)), 2)
    model.stages[0].load(StageContext())
    with pytest.raises(SpecError, match=r"lacks \['2.bias'\]"):
        model.stages[1].load(StageContext())


def test_non_persistent_buffers_are_reported_separately(tmp_path: Path) -> None:
    """They cannot be saved, so the remedy differs."""

    def made() -> nn.Module:
        whole = chain()
        whole.get_submodule("0").register_buffer(
            "freq", torch.ones(3), persistent=False
        )
        return whole

    save_file(made().state_dict(), tmp_path / "model.safetensors")
    given = {**CHAIN, "make": made, "weights": str(tmp_path)}
    model = cut_module(Module(**given), 1)
    with pytest.raises(SpecError, match="register them as persistent"):
        model.stages[0].load(StageContext())


def test_output_named_like_a_forwarded_input_is_refused() -> None:
    """A stage would send two tensors with the same name."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.a(x)
            return hidden, self.b(hidden) + x

    row = TensorSpec("x", "FP32", (-1, 4))
    after = TensorSpec("z", "FP32", (-1, 4))
    made = cut_module(Module(make=Early, inputs=[row], outputs=[row, after]), 2)
    with pytest.raises(SpecError, match="the name of an input and of an output"):
        made.stages[0].load(StageContext())
