"""Writer of ``docs/serve/spec.md``: ``python -m tests.meta.spec_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multiworld.serve.spec.loader import schema

PAGE = Path(__file__).parents[2] / "docs" / "serve" / "spec.md"

HEAD = """# Every field of a spec

`multiworld schema > app.schema.json` gives the JSON Schema; editors that know YAML
schemas complete and check the file with it
(`# yaml-language-server: $schema=app.schema.json`). Unknown keys are errors.
"""

SECTIONS = {
    "AppSpec": ("a spec", "a spec"),
    "ModelSpec": ("models.NAME", "a model"),
    "GenerationSpec": ("models.NAME.generation", "generation"),
    "StageSpec": ("models.NAME.stages[]", "a stage"),
    "AutoscalingConfig": ("autoscaling_config", "limits and delays"),
    "ReplicaRange": ("replicas, as a range", "a range"),
    "GatewaySpec": ("gateway", "a gateway"),
    "MachineSpec": ("machine", "a machine"),
    "RaySpec": ("ray", "a cluster"),
}
"""Section title and name of a field, by definition."""


def page() -> str:
    found = schema()
    definitions = {"AppSpec": found, **found["$defs"]}
    parts = [HEAD]
    for name, (title, _) in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| field | type | default | meaning |\n")
        parts.append("|---|---|---|---|\n")
        required = definitions[name].get("required", [])
        for key, field in definitions[name]["properties"].items():
            meaning = " ".join(field.get("description", "").split())
            default = _default(field, is_required=key in required)
            parts.append(f"| `{key}` | {_type(field)} | {default} | {meaning} |\n")
    return "".join(parts) + "\n"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return SECTIONS[field["$ref"].rpartition("/")[2]][1]
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    more = field.get("additionalProperties")
    if isinstance(more, dict) and "$ref" in more:
        return f"mapping to {_type(more)}"
    return str(field["type"])


def _default(field: dict[str, Any], *, is_required: bool) -> str:
    if is_required:
        return "required"
    default = field.get("default")
    if default is None:
        is_empty = field.get("type") in ("object", "array")
        return "(empty)" if is_empty else "none"
    if isinstance(default, dict):
        return "as below"
    return str(default) or "(empty)"


if __name__ == "__main__":
    PAGE.write_text(page())
