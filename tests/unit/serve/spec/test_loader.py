"""Mistakes in specs, each reported with its line and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from multiworld.errors import SpecError
from multiworld.serve.spec.loader import load_spec, parse_spec, schema
from multiworld.serve.spec.schema import PATTERNS, AppSpec

GOOD = """\
app: demo
models:
  m:
    factory: a.b:model
    version: 2
    stages:
      - name: one
        replicas: 2
      - replicas: {min_replicas: 1, max_replicas: 3}
        max_wait_ms: 2.5
gateway:
  port: 0
"""


def test_good_spec_is_read() -> None:
    spec = parse_spec(GOOD)
    model = spec.models["m"]
    assert model.version == "2"
    assert [stage.initial_count for stage in model.stages] == [2, 1]
    assert spec.gateway.port == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("app: demo", "app: Demo!", 1, "lower-case letters"),
        ("models:", "modles:", 2, "did you mean models?"),
        ("    factory: a.b:model\n", "", 3, "give either factory or path"),
        ("a.b:model", "a.b.model", 4, "package.module:function"),
        ("a.b:model", "a.b:model\n    path: /x", 3, "give either factory or path"),
        ("version: 2", "version: [2]", 5, "string"),
        ("version: 2", "version: a/b", 5, "letters, digits"),
        ("name: one", "nam: one", 7, "did you mean name?"),
        ("replicas: 2", "replicas: 0", 8, "greater than or equal to 1 (it is 0)"),
        ("replicas: 2", "replicas: two", 8, "write an integer, or {min_replicas"),
        ("replicas: 2", "replicas: yes", 8, "write an integer"),
        ("replicas: 2", 'replicas: "2"', 8, "write an integer"),
        ("replicas: 2", "replicas: [1, 2]", 8, "write an integer"),
        ("version: 2", "version: 1.10", 5, "quote it"),
        ("version: 2", "max_queued_requests: yes", 5, "integer"),
        ("version: 2", "max_queued_requests: 010", 5, "integer"),
        ("version: 2", "weight: on", 5, "number"),
        ("      - name: one", "      - name: '1'", 6, "two stages are called '1'"),
        ("gateway:\n  port: 0", "gateway: 8000", 11, "write a mapping"),
        ("app: demo", "app: demo\nsilence_s: 2s", 2, "seconds as a number"),
        ("models:\n  m:", "models: &a\n  x: *a\n  m:", 1, "refers to itself"),
        ("replicas: 2", "replicas: 2\n        replicas: 3", 9, "given twice"),
        ("max_replicas: 3", "max_replicas: 0", 9, "greater than or equal to 1"),
        ("min_replicas: 1", "min_replicas: 5", 9, "swap them"),
        (
            "min_replicas: 1, ",
            "min: 1, ",
            9,
            "did you mean min_replicas?",
        ),
        ("max_replicas: 3", "min_replicas: 3", 9, "given twice"),
        (", max_replicas: 3", "", 9, "max_replicas is missing"),
        ("2.5", "-1", 10, "greater than or equal to 0"),
        ("2.5", "soon", 10, "number"),
        ("port: 0", "port: 70000", 12, "65535"),
        ("port: 0", "prot: 0", 12, "did you mean port?"),
        ("port: 0", "tls_key: k.pem", 11, "tls_certificate and tls_key together"),
        ("  m:\n", "  Mo del:\n", 2, "model name 'Mo del'"),
        ("  m:\n", "  gateway:\n", 2, "is reserved for gateways; rename the model"),
        ("gateway:\n", "gateway\n", 12, "check indentation"),
        ("app: demo", "app: 'demo", 1, "not valid YAML"),
        ("    stages:\n", "   stages:\n", 6, "not valid YAML"),
        (
            GOOD[GOOD.index("    stages") : GOOD.index("gateway")],
            "",
            3,
            "stages is missing",
        ),
        (GOOD, "- a\n- b\n", 1, "a spec must be a mapping"),
        (GOOD, "", 1, "a spec must be a mapping"),
        ("app: demo", "app: demo\nsilence_s: 0.01", 2, "greater than or equal to 0.1"),
        ("app: demo", "app: demo\nlauncher: /x", 2, "local, ray, or package"),
        ("app: demo", "app: demo\nray: {}", 1, "add `launcher: ray`"),
        ("port: 0", "host: ''", 12, "host"),
        ("2.5", ".inf", 10, "less than or equal to"),
        ("  m:\n", "  int:\n    stagez: []\n", 4, "stagez"),
        ("  m:\n", "  function-call:\n    stagez: []\n", 4, "stagez"),
        (
            "  m:\n",
            "  m:\n    options: {a: [{1: b}]}\n",
            4,
            "the key 1 in 'a' in item 0",
        ),
        ("  m:\n", "  m:\n    options: {a: -.inf}\n", 4, "write it as a string"),
        ("  m:\n", "  m:\n    options: {a: 2024-01-01}\n", 4, "write it as a string"),
        *(
            (
                "    stages:\n      - name: one",
                f"    generation: {{reasoning_marks: {marks}}}\n    stages:\n      -",
                6,
                "two different marks",
            )
            for marks in ("[a]", "[a, a]", '["<a>", "</a>\\n"]')
        ),
        (
            "    stages:\n      - name: one",
            "    generation: {deterministic: true}\n    stages:\n      - device: cuda",
            3,
            "deterministic is for CPUs only",
        ),
        (
            "    stages:\n      - name: one",
            "    generation: {quantization: int8}\n    stages:\n      - device: cuda",
            3,
            "quantization is for CPUs only",
        ),
        (
            "    stages:\n      - name: one",
            "    generation: {}\n    stages:\n      - ranks: 2",
            3,
            "one rank in each stage",
        ),
        (
            "    stages:\n      - name: one",
            "    generation: {}\n    objective_ms: 9\n    stages:\n      - name: one",
            3,
            "objective_ms has no effect on generated text; see ttft_ms",
        ),
        (
            "    stages:\n      - name: one",
            "    scaling: a:b\n    stages:\n      - name: one",
            3,
            "scaling has no effect without an autoscaling_config",
        ),
        (
            "    stages:\n      - name: one",
            "    generation: {}\n    stages:\n      - max_batch_size: 8",
            3,
            "max_batch_size has no effect on generated text; see max_num_seqs",
        ),
    ],
)
def test_mistake_is_reported_with_line_and_remedy(
    old: str, new: str, line: int, words: str
) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "app.yaml")
    assert any(
        f"line {line}:" in problem and words in problem
        for problem in caught.value.problems
    ), caught.value.problems
    assert "app.yaml" in str(caught.value)


@pytest.mark.parametrize("value", ["2001-13-01", "9" * 5000, "!!bool x", "!!int x"])
def test_value_that_is_not_what_it_seems_is_a_mistake(value: str) -> None:
    """PyYAML converts such values without a check."""
    with pytest.raises(SpecError, match="put it in quotes"):
        parse_spec(GOOD.replace("app: demo", f"app: {value}"))


def test_aliases_that_unfold_without_end_are_refused() -> None:
    """Nine levels of nine aliases are hundreds of millions of values in 450 bytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(SpecError) as caught:
        parse_spec("\n".join(lines))
    assert caught.value.problems == (
        "line 1: the spec's aliases expand to more than 100000 values; use fewer",
    )


def test_all_mistakes_are_reported_at_once() -> None:
    text = GOOD.replace("app: demo", "ap: demo").replace("port: 0", "port: -1")
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert len(caught.value.problems) == 2


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_spec(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read"):
        load_spec(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    "model",
    [
        {"path": "x", "engine": "vllm", "replicas": 3, "device": "cuda"},
        {"factory": "a:b", "stages": [{"name": "front"}, {}]},
    ],
)
def test_schema_has_models_with_stages_and_with_an_engine(
    model: dict[str, Any],
) -> None:
    validator = jsonschema_rs.validator_for(schema())
    assert validator.is_valid({"app": "a", "models": {"m": model}})
    assert not validator.is_valid({"app": "a", "models": {"m": {**model, "x": 1}}})


def test_schema_describes_every_field() -> None:
    """Editors show the descriptions."""
    found = schema()
    assert found["properties"]["models"]
    for definition in found["$defs"].values():
        for name, field in definition.get("properties", {}).items():
            assert field.get("description"), name


def test_characters_in_two_surrogates_are_joined() -> None:
    """JSON writes some characters so; half of a pair is not text."""
    text = GOOD.replace("app: demo", 'app: demo\nlabels: "\\ud83d\\ude00"')
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert "labels" in str(caught.value)
    factory = GOOD.replace(
        "    stages:", '    options: {a: "\\ud83d\\ude00"}\n    stages:'
    )
    (model,) = parse_spec(factory).models.values()
    assert model.options == {"a": "\N{GRINNING FACE}"}
    with pytest.raises(SpecError, match="surrogate"):
        parse_spec(factory.replace("\\ude00", ""))


@pytest.mark.parametrize("name", ["function-calling", "constrained", "int"])
def test_mistake_below_a_name_like_that_of_a_form_is_reported(name: str) -> None:
    """Pydantic puts the names of union members in the same place."""
    text = f"models:\n  m: {{engine: vllm, path: /x, adapters:\n    {{{name}: [5]}}}}"
    with pytest.raises(SpecError, match=rf"line 3: models.m.adapters.{name}: "):
        parse_spec(text)


def test_remedies_are_those_of_the_field() -> None:
    """Replicas of the gateway are a number, not a range."""
    with pytest.raises(SpecError) as caught:
        parse_spec(
            "models: {m: {factory: a:b, stages: [{}]}}\ngateway: {replicas: two}"
        )
    (problem,) = caught.value.problems
    assert "gateway.replicas" in problem
    assert "min_replicas" not in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gateway: {cors_origins: ['https://a.b/']}", "scheme, host and port"),
        ("gateway: {cors_origins: [a.b]}", "scheme, host and port"),
        (f"x: {'[' * 150}{']' * 150}", "100 levels"),
    ],
)
def test_odd_values_are_named(text: str, words: str) -> None:
    model = "models: {m: {factory: 'a.b:c', stages: [{}]"
    if text.startswith("x: "):
        whole = f"{model}, options: {{{text}}}}}}}"
    else:
        whole = f"{model}}}}}\n{text}"
    with pytest.raises(SpecError, match=words):
        parse_spec(whole)


def test_every_pattern_has_a_remedy() -> None:
    def patterns(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            part = list(part.values())
        if isinstance(part, list):
            for each in part:
                yield from patterns(each)

    assert {*patterns(AppSpec.model_json_schema())} <= PATTERNS.keys()
