"""Manifests for Kubernetes, and the specs in them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from multiworld.errors import SpecError
from multiworld.serve.spec.loader import parse_spec

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
CRDS = ROOT / "tests" / "data" / "crds"
PLAIN = {("v1", "ConfigMap"), ("v1", "Service")}
"""Kinds of Kubernetes itself, which have no schema here."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that refuses fields it does not know, as the API server warns."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: closed(inner) for name, inner in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found[key] = closed(value)
        else:
            found[key] = value
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and not is_open and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def schemas() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for path in CRDS.glob("*.json.gz"):
        crd = json.loads(gzip.decompress(path.read_bytes()))
        schema = closed(crd["schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[f"{crd['group']}/{crd['version']}", crd["kind"]] = schema
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_is_valid(path: Path) -> None:
    known = schemas()
    kinds = []
    for document in documents(path):
        kind = document["apiVersion"], document["kind"]
        kinds.append(kind)
        assert document["metadata"]["name"]
        if kind not in PLAIN:
            jsonschema_rs.Draft202012Validator(known[kind]).validate(document)
    assert any(kind not in PLAIN for kind in kinds)


def test_wrong_field_would_be_found() -> None:
    (document,) = [
        d
        for d in documents(ROOT / "examples" / "kubernetes" / "kuberay.yaml")
        if d["kind"] == "RayCluster"
    ]
    document["spec"]["headGroupSpec"]["template"]["spec"]["conteiners"] = []
    schema = schemas()["ray.io/v1", "RayCluster"]
    with pytest.raises(jsonschema_rs.ValidationError, match="conteiners"):
        jsonschema_rs.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_spec_in_a_manifest_is_one(path: Path) -> None:
    """The spec is valid, and the ports, volumes and selectors match."""
    found = documents(path)
    (config,) = [d for d in found if d["kind"] == "ConfigMap"]
    app = parse_spec(config["data"]["app.yaml"], str(path))
    assert (app.launcher, app.host) == ("ray", "auto")
    services = [d["spec"] for d in found if d["kind"] == "Service"]
    ports = {port["targetPort"] for each in services for port in each["ports"]}
    assert app.gateway.port in ports
    assert app.gateway.authentication == "keys"
    text = path.read_text()
    assert f"name: {config['metadata']['name']}}}" in text
    for model in app.models.values():
        for stage in model.stages:
            for node in stage.nodes:
                role = node.removesuffix("-*")
                assert any(d["metadata"]["name"] == role for d in found), node


def test_workers_reach_the_head_before_it_is_ready() -> None:
    """The head is ready only once they have joined."""
    path = ROOT / "examples" / "kubernetes" / "leaderworkerset.yaml"
    (name,) = {*re.findall("--address=(.*?):6379", path.read_text())}
    (service,) = [
        d
        for d in documents(path)
        if d["kind"] == "Service" and d["metadata"]["name"] == name
    ]
    assert service["spec"]["publishNotReadyAddresses"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [6379]


def test_policy_of_every_role_is_none() -> None:
    """A lost pod must not restart its group."""
    found = documents(ROOT / "examples" / "kubernetes" / "leaderworkerset.yaml")
    roles = [d for d in found if d["kind"] == "LeaderWorkerSet"]
    app = next(d for d in found if d["kind"] == "ConfigMap")["data"]["app.yaml"]
    stages = parse_spec(app).models["encoder"].stages
    assert [d["metadata"]["name"] for d in roles] == [
        "control",
        *(stage.name for stage in stages),
    ]
    for role in roles:
        assert role["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_spec_with_a_mistake_would_be_found() -> None:
    with pytest.raises(SpecError):
        parse_spec("models: {}")
