"""Tensors of the Open Inference Protocol: parsing, rendering and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.openinference.tensor_format import (
    PIECE,
    NotFiniteError,
    listed,
    parse,
    render,
)
from multiworld.serve.spec.stage import Model, Stage, TensorSpec

MODEL = Model(
    stages=[Stage(load=lambda context: lambda tensors: tensors)],
    inputs=[TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1,))],
    outputs=[TensorSpec("y", "FP32", (-1, 2))],
)
ANY = Model(stages=MODEL.stages)


def body(**changes: Any) -> dict[str, Any]:
    x = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2.5, 3, 4]}
    n = {"name": "n", "datatype": "INT64", "shape": [2], "data": [7, 8]}
    return {"inputs": [{**x, **changes}, n]}


def test_json_is_read_flat_or_nested() -> None:
    """The protocol allows both forms."""
    flat = parse(json.dumps(body()).encode(), None, MODEL)
    nested = parse(json.dumps(body(data=[[1, 2.5], [3, 4]])).encode(), None, MODEL)
    assert torch.equal(flat.tensors["x"], torch.tensor([[1, 2.5], [3, 4]]))
    assert torch.equal(flat.tensors["x"], nested.tensors["x"])
    assert flat.tensors["n"].dtype == torch.int64


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("BOOL", torch.bool),
        ("UINT8", torch.uint8),
        ("INT16", torch.int16),
        ("FP16", torch.float16),
        ("BF16", torch.bfloat16),
        ("FP64", torch.float64),
    ],
)
def test_binary_round_trip(datatype: str, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    raw = bytes(tensor.view(torch.uint8).flatten().tolist())
    parameters = {"binary_data_size": len(raw)}
    item = {
        "name": "t",
        "datatype": datatype,
        "shape": [2, 2],
        "parameters": parameters,
    }
    asked = {"inputs": [item], "parameters": {"binary_data_output": True}, "id": "a"}
    head = json.dumps(asked).encode()
    found = parse(head + raw, str(len(head)), ANY)
    assert torch.equal(found.tensors["t"], tensor)
    answer, length = render("m", "1", found, found.tensors)
    assert length is not None
    said = json.loads(answer[:length])
    assert said["id"] == "a"
    assert said["outputs"][0]["datatype"] == datatype
    assert answer[length:] == raw


def test_requested_outputs_are_rendered_each_in_its_form() -> None:
    asked = body()
    asked["outputs"] = [{"name": "y", "parameters": {"binary_data": False}}]
    found = parse(json.dumps(asked).encode(), None, MODEL)
    answer, length = render(
        "m", "1", found, {"y": torch.ones(2, 2), "z": torch.zeros(2)}
    )
    assert length is None
    outputs = json.loads(answer)["outputs"]
    assert [o["name"] for o in outputs] == ["y"]
    assert outputs[0]["data"] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"datatype": "FP31"}, "datatype 'FP31' is unknown"),
        ({"datatype": ["FP32"]}, "got `array` - at `$.inputs[0].datatype`"),
        ({"datatype": "FP64"}, "must be FP32"),
        ({"shape": [4]}, "must have shape"),
        ({"shape": [4, 1]}, "must have shape"),
        ({"shape": [3, 2]}, "data has 4 values, but the tensor's shape needs 6"),
        ({"shape": [-1, 2]}, "list of sizes"),
        ({"shape": [True, 4]}, "list of sizes"),
        ({"shape": "2,2"}, "list of sizes"),
        ({"shape": [0, 2], "data": []}, "is empty"),
        ({"data": "1234"}, "must be a list"),
        ({"data": None}, "must be a list"),
        ({"data": [1, 2, 3, "4"]}, '"4" is not a valid FP32 value'),
        ({"data": [1, 2, 3, None]}, "null is not a valid FP32 value"),
        ({"data": [1, 2, 3, True]}, "true is not a valid FP32 value"),
        ({"name": "z"}, "takes the inputs x, n; the request has z, n"),
        ({"name": 3}, "got `int` - at `$.inputs[0].name`"),
        ({"name": "n"}, "occurs twice"),
        ({"parameters": [1]}, '"parameters" is not valid'),
        (
            {"parameters": {"binary_data_size": 16.0}, "data": None},
            "the tensor's shape needs 16 bytes",
        ),
        ({"parameters": {"binary_data_size": 16}}, "both data and binary_data_size"),
        ({"shape": [0, 2**64], "data": []}, "list of sizes"),
        ({"shape": [2**30, 2**30], "data": []}, "too large"),
        ({"shape": [1, 0, 2**39, 2**39], "data": []}, "too large"),
        ({"datatype": "UINT8", "data": [1, 2, 3, -1]}, "-1 is not a valid UINT8"),
        ({"datatype": "UINT16", "data": [1, -2, 3, 4]}, "-2 is not a valid UINT16"),
        ({"datatype": "UINT32", "data": [-3, 2, 3, 4]}, "-3 is not a valid UINT32"),
        ({"parameters": {"binary_data_size": 16}, "data": None}, "the body has only"),
        ({"parameters": {"binary_data_size": 5}, "data": None}, "shape needs 16 bytes"),
    ],
)
def test_bad_input_is_reported(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        parse(json.dumps(body(**changes)).encode(), None, MODEL)


@pytest.mark.parametrize(
    ("raw", "length", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b'{"inputs": {}}', None, "got `object` - at `\\$.inputs`"),
        (b'{"inputs": [1]}', None, "got `int`"),
        (b"{}", None, "missing required field `inputs`"),
        (b"{}", "5", "at most 2"),
        (b"{}", "-1", "at most 2"),
        (b"{}", "x", "at most 2"),
        (b'{"inputs": []}', None, "the request has none"),
        (b'{"inputs": [], "parameters": 3}', None, '"parameters" is not valid'),
        (b"{}", "1" * 5000, "at most 2"),
    ],
)
def test_bad_body_is_reported(raw: bytes, length: str | None, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parse(raw, length, MODEL)


@pytest.mark.parametrize(
    "parameters", [{"classification": 1}, {"shared_memory_region": "r"}]
)
def test_output_of_another_form_is_refused(parameters: dict[str, Any]) -> None:
    """Otherwise its client would take plain numbers for what it requested."""
    asked = {**body(), "outputs": [{"name": "y", "parameters": parameters}]}
    with pytest.raises(InvalidRequestError, match="classification and shared memory"):
        parse(json.dumps(asked).encode(), None, MODEL)


def test_extra_bytes_are_an_error() -> None:
    head = json.dumps(body()).encode()
    with pytest.raises(InvalidRequestError, match="3 extra bytes"):
        parse(head + b"abc", str(len(head)), MODEL)


def test_rows_must_agree_even_without_input_specs() -> None:
    """Otherwise a stage could not assign rows to requests."""
    n = {"name": "n", "datatype": "INT64", "shape": [3], "data": [7, 8, 9]}
    asked = json.dumps({"inputs": [body()["inputs"][0], n]}).encode()
    for model in (MODEL, ANY):
        with pytest.raises(InvalidRequestError, match="same number of rows"):
            parse(asked, None, model)


def test_unknown_outputs_are_an_error() -> None:
    asked = {**body(), "outputs": [{"name": "z"}]}
    with pytest.raises(InvalidRequestError, match="model has no output z; it has y"):
        parse(json.dumps(asked).encode(), None, MODEL)


# What a body can cost.


@pytest.mark.parametrize(
    "value", [1e39, -1e39, 3.5e38], ids=["over", "under", "just over"]
)
def test_number_that_the_datatype_cannot_hold_is_refused(value: float) -> None:
    """It would silently become an infinity."""
    with pytest.raises(InvalidRequestError, match="too large for FP32"):
        parse(json.dumps(body(data=[1, 2, 3, value])).encode(), None, MODEL)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_json_number_is_refused(word: str) -> None:
    """Python's own encoder writes such words, and JSON has none."""
    text = json.dumps(body()).replace("2.5", word)
    with pytest.raises(InvalidRequestError):
        parse(text.encode(), None, MODEL)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_answer_that_json_cannot_carry_is_an_error(value: float) -> None:
    """It must not become a silent null; binary data can carry it."""
    asked = parse(json.dumps(body()).encode(), None, MODEL)
    tensors = {"y": torch.tensor([[1.0, value]])}
    with pytest.raises(NotFiniteError, match="output 'y' has NaN or an infinity"):
        render("m", "1", asked, tensors)
    binary = {**body(), "parameters": {"binary_data_output": True}}
    asked = parse(json.dumps(binary).encode(), None, MODEL)
    content, length = render("m", "1", asked, tensors)
    assert length is not None
    found = torch.frombuffer(bytearray(content[length:]), dtype=torch.float32)
    assert torch.equal(found.isfinite(), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (f'{{"inputs": [{",".join(["{}"] * 5000)}]}}', "objects"),
        (f'{{"inputs": INPUTS, "outputs": [{",".join(["[]"] * 9000)}]}}', '"outputs"'),
        (f'{{"inputs": [], "parameters": {{"a": [{"[]," * 9000}]}}}}', "JSON"),
        (f'{{"inputs": [], "parameters": {{"a": "{"x" * 20_000}"}}}}', '"parameters"'),
    ],
    ids=["objects", "outputs", "no JSON", "parameters"],
)
def test_parts_of_any_type_are_small(part: str, words: str) -> None:
    """Each would cost a thousand times its bytes."""
    inputs = json.dumps(body()["inputs"])
    with pytest.raises(InvalidRequestError, match=words):
        parse(part.replace("INPUTS", inputs).encode(), None, MODEL)


@pytest.mark.parametrize(
    "data",
    ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "[],".join([""] * 100_000) + "[]"],
    ids=["open", "deep", "wide"],
)
def test_brackets_without_numbers_make_no_lists(data: str) -> None:
    """Millions of lists would keep the garbage collector busy for seconds."""
    data = f"[{data}]" if data.endswith("]") else data
    text = json.dumps(body(data="DATA")).replace('"DATA"', data)
    with pytest.raises(InvalidRequestError):
        parse(text.encode(), None, MODEL)


def test_long_list_is_decoded_in_pieces() -> None:
    count = 300_000
    expected = torch.arange(count, dtype=torch.float32).view(-1, 2)
    for data in (list(range(count)), expected.tolist()):
        for spaced in (None, 1):
            asked = body(shape=[count // 2, 2], data=data)
            text = json.dumps({"inputs": asked["inputs"][:1]}, indent=spaced)
            found = parse(text.encode(), None, ANY)
            assert torch.equal(found.tensors["x"], expected)


def test_long_answers_are_written_in_pieces() -> None:
    """Other requests go on meanwhile; the text is as if it were written at once."""
    values = torch.arange(3 * PIECE + 7).float()
    for part in (values, values[:0], values[:1], values[:PIECE]):
        assert json.loads(b"".join(listed(part))) == part.tolist()
    longest = max(len(piece) for piece in listed(values))
    assert longest < len(b"".join(listed(values))) / 2
