"""The Open Inference Protocol: parsing, rendering, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.open_inference import parse, render
from multiworld.serve.spec.stage import Model, Stage, TensorSpec

MODEL = Model(
    stages=[Stage(load=lambda context: lambda tensors: tensors)],
    inputs=[TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1,))],
    outputs=[TensorSpec("y", "FP32", (-1, 2))],
)
ANY = Model(stages=MODEL.stages)


def body(**changes: Any) -> dict[str, Any]:
    """Return a request, with changes to its first input."""
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
    """Bytes in, the same bytes out."""
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
    """JSON by default."""
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
        ({"datatype": ["FP32"]}, "is unknown"),
        ({"datatype": "FP64"}, "must be FP32"),
        ({"shape": [4]}, "must have shape"),
        ({"shape": [4, 1]}, "must have shape"),
        ({"shape": [3, 2]}, "4 values in data; its shape needs 6"),
        ({"shape": [-1, 2]}, "list of sizes"),
        ({"shape": [True, 4]}, "list of sizes"),
        ({"shape": "2,2"}, "list of sizes"),
        ({"shape": [0, 2], "data": []}, "is empty"),
        ({"data": "1234"}, "must be a list"),
        ({"data": None}, "must be a list"),
        ({"data": [1, 2, 3, "4"]}, "'4' is not a valid FP32 value"),
        ({"data": [1, 2, 3, None]}, "None is not a valid FP32 value"),
        ({"data": [1, 2, 3, True]}, "True is not a valid FP32 value"),
        ({"name": "z"}, "takes the inputs x, n; the request has z, n"),
        ({"name": 3}, 'has no "name"'),
        ({"name": "n"}, "occurs twice"),
        ({"parameters": [1]}, "must be an object"),
        ({"parameters": {"binary_data_size": 16.0}}, "its shape needs 16"),
        ({"shape": [0, 2**64], "data": []}, "list of sizes"),
        ({"shape": [2**30, 2**30], "data": []}, "too large"),
        ({"parameters": {"binary_data_size": 16}}, "body ends before"),
        ({"parameters": {"binary_data_size": 5}}, "its shape needs 16"),
    ],
)
def test_bad_input_is_reported(changes: dict[str, Any], words: str) -> None:
    """The error says what to change."""
    with pytest.raises(InvalidRequestError, match=words.replace("[", r"\[")):
        parse(json.dumps(body(**changes)).encode(), None, MODEL)


@pytest.mark.parametrize(
    ("raw", "length", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b"[]", None, '"inputs"'),
        (b'{"inputs": {}}', None, '"inputs"'),
        (b'{"inputs": [1]}', None, 'has no "name"'),
        (b"{}", "5", "at most 2"),
        (b"{}", "-1", "at most 2"),
        (b"{}", "x", "at most 2"),
        (b'{"inputs": []}', None, "the request has none"),
        (b'{"inputs": [], "parameters": 3}', None, "must be an object"),
        (b"{}", "1" * 5000, "at most 2"),
    ],
)
def test_bad_body_is_reported(raw: bytes, length: str | None, words: str) -> None:
    """Before anything is computed."""
    with pytest.raises(InvalidRequestError, match=words):
        parse(raw, length, MODEL)


def test_extra_bytes_are_an_error() -> None:
    """A client with wrong lengths gets an error."""
    head = json.dumps(body()).encode()
    with pytest.raises(InvalidRequestError, match="3 extra bytes"):
        parse(head + b"abc", str(len(head)), MODEL)


def test_rows_must_agree_even_without_input_specs() -> None:
    """Else a stage could not assign rows to requests."""
    n = {"name": "n", "datatype": "INT64", "shape": [3], "data": [7, 8, 9]}
    asked = json.dumps({"inputs": [body()["inputs"][0], n]}).encode()
    for model in (MODEL, ANY):
        with pytest.raises(InvalidRequestError, match="same number of rows"):
            parse(asked, None, model)


def test_unknown_outputs_are_an_error() -> None:
    """The error lists the known outputs."""
    asked = {**body(), "outputs": [{"name": "z"}]}
    with pytest.raises(InvalidRequestError, match="has the outputs y"):
        parse(json.dumps(asked).encode(), None, MODEL)
