"""Loader for YAML specs: reports every mistake with its line and a remedy."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from multiworld.errors import SpecError
from multiworld.serve.spec.dedicated import with_dedicated
from multiworld.serve.spec.profiles import with_profiles
from multiworld.serve.spec.schema import PATTERNS, AppSpec
from multiworld.serve.spec.yaml_numbers import RESOLVERS

MAX_BYTES = 1024 * 1024  # maximum bytes of a spec

MAX_NODES = 100_000  # maximum keys, values and lists of a spec, with aliases expanded

KeyPath = tuple[str | int, ...]  # keys and list indices that lead to a value


def load_spec(path: Path) -> AppSpec:
    """Read a YAML spec from a file; ``SpecError.problems`` lists every mistake."""
    return parse_spec(read_text(path), str(path))


def _of_folder(path: Path) -> SpecError:
    """Return the error for a folder given in place of a spec, with a remedy."""
    specs = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
    if len(specs) == 1:
        return SpecError(f"{path} is a folder; give its spec, {specs[0]}")
    if (path / "config.json").exists():
        return SpecError(
            f"{path} is the folder of a model, but a spec is needed. Save this as "
            f"app.yaml, and give app.yaml:\n\nmodels:\n  {path.resolve().name}:\n"
            f"    path: {path.resolve()}\n    generation: {{}}\n    stages: [{{}}]"
        )
    return SpecError(
        f"the folder {path} has neither the config.json of a model nor exactly one "
        "YAML file; give a spec, or the folder of a model"
    )


def read_text(path: Path) -> str:
    if path.is_dir():
        raise _of_folder(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path} is longer than {MAX_BYTES} bytes; split the spec")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"cannot read {path}: {reason}") from error


def parse_spec(text: str, where: str = "spec") -> AppSpec:
    """Read a YAML spec; paths of profiles are relative to the folder of ``where``."""
    if len(text) > MAX_BYTES:
        raise SpecError(f"{where} is longer than {MAX_BYTES} bytes; split the spec")
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is not None and _size(root, {}) > MAX_NODES:
            why = (
                f"line 1: the spec's aliases expand to more than {MAX_NODES} values; "
                "use fewer"
            )
            raise _spec_error(where, [why])
        data = yaml.load(text, Loader=_Loader)
    except SpecError:
        raise
    except yaml.YAMLError as error:
        raise _spec_error(where, [_describe_yaml_error(error)]) from error
    except RecursionError:
        why = "line 1: the spec is nested too deeply or refers to itself; flatten it"
        raise _spec_error(where, [why]) from None
    except Exception as error:  # PyYAML converts values unchecked: any error may occur
        why = f"line 1: a value cannot be converted ({error}); put it in quotes"
        raise _spec_error(where, [why]) from error
    if not isinstance(root, yaml.MappingNode):
        raise _spec_error(
            where, ["line 1: a spec must be a mapping; start with `models:`"]
        )
    lines: dict[KeyPath, int] = {}
    try:
        problems = _walk(root, (), lines)
    except (RecursionError, TypeError) as error:  # nested aliases; a tagged list as key
        text = "line 1: the spec is nested too deeply, or has a key that is no name"
        raise _spec_error(where, [text]) from error
    try:
        spec = AppSpec.model_validate(data)
    except ValidationError as error:
        errors: list[dict[str, Any]] = [
            {**e, "loc": _as_written(e["loc"], lines)} for e in error.errors()
        ]
        found = []
        for e in [e for e in errors if not _is_of_other_form(e, lines)] or errors:
            at = tuple(part for part, is_form in _parts(e["loc"], lines) if not is_form)
            found.append((_line(lines, at), _describe_validation_error(e, at)))
        problems += [f"line {line}: {text}" for line, text in sorted(set(found))]
        raise _spec_error(where, problems) from error
    for name, model in spec.models.items():
        if model.identity is not None:
            line = _line(lines, ("models", name, "identity"))
            problems.append(f"line {line}: identity is set by the service; remove it")
    if problems:
        raise _spec_error(where, problems)
    spec = with_profiles(spec, Path(where).parent)
    return spec.model_copy(update={"models": with_dedicated(spec.models)})


def schema() -> dict[str, Any]:
    found = AppSpec.model_json_schema()
    # Only a model without an ``engine`` needs stages.
    found["$defs"]["ModelSpec"]["required"].remove("stages")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _spec_error(where: str, problems: list[str]) -> SpecError:
    count = f"{len(problems)} mistakes" if len(problems) > 1 else "a mistake"
    text = "\n".join(f"  {problem}" for problem in problems)
    return SpecError(f"{where} has {count}:\n{text}", problems=tuple(problems))


class _Loader(yaml.SafeLoader):
    """A safe loader that reads 010 and 1:30 as strings, and 1e3 as 1000.

    YAML 1.1 would read 010 as 8 and 1:30 as 90. The loader also joins the surrogate
    pairs that JSON uses to escape characters such as emoji.
    """

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if value.isascii():
            return value
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise yaml.constructor.ConstructorError(
                problem="half of a surrogate pair, which is not valid Unicode",
                problem_mark=node.start_mark,
            ) from None


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, RESOLVERS.get(tag, rule)) for tag, rule in found]
    for letter, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _describe_yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    if "end of stream" in what:  # point to the start of the unclosed item
        mark = getattr(error, "context_mark", None) or mark
        what = f"{getattr(error, 'context', None) or 'while parsing'}: {what}"
    line = 1 if mark is None else mark.line + 1
    return f"line {line}: not valid YAML: {what}; check indentation, colons and quotes"


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of nodes below a node, with every alias expanded."""
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _walk(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int]) -> list[str]:
    """Record the line of every value; return a problem for each duplicate key."""
    lines[at] = node.start_mark.line + 1
    problems: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: dict[Any, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                problems.append(
                    f"line {line}: {_dotted((*at, key.value))} is given twice (first "
                    f"on line {seen[key.value]}); remove one"
                )
            seen[key.value] = line
            problems += _walk(value, (*at, key.value), lines)
            lines[(*at, key.value)] = line
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            problems += _walk(value, (*at, number), lines)
    return problems


def _line(lines: dict[KeyPath, int], at: KeyPath) -> int:
    """Return the line of a value, or of its nearest ancestor that has one."""
    while at not in lines and at:
        at = at[:-1]
    return lines.get(at, 1)


def _as_written(loc: KeyPath, lines: dict[KeyPath, int]) -> KeyPath:
    """Return a location without the stage that the schema adds for an engine."""
    is_added = loc[2:4] == ("stages", 0) and loc[:3] not in lines
    return (*loc[:2], *loc[4:]) if is_added else loc


def _parts(loc: KeyPath, lines: dict[KeyPath, int]) -> Iterator[tuple[str | int, bool]]:
    """Yield each part of a location, and whether the part names a union member."""
    at: KeyPath = ()
    for part in loc:
        # A key of the spec may be spelled like the name of a union member.
        is_form = _is_form(part) and (*at, part) not in lines
        at = at if is_form else (*at, part)
        yield part, is_form


def _is_form(part: str | int) -> bool:
    known = part in ("ReplicaRange", "int")
    return known or str(part).startswith(("constrained", "function"))


def _is_of_other_form(error: Any, lines: dict[KeyPath, int]) -> bool:
    """Return whether an error is about a union member that the user did not mean."""
    # Pydantic reports errors for all members of a union, such as number and mapping.
    forms = [part for part, is_form in _parts(error["loc"], lines) if is_form]
    if not forms:
        return False
    is_mapping = error["loc"][-1] not in forms or isinstance(error.get("input"), dict)
    return is_mapping == (str(forms[0]) in ("int", "constrained-int"))


def _describe_validation_error(error: Any, at: KeyPath) -> str:
    name = _dotted(at) or "the spec"
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"{name} is unknown; {_suggestion(at)}"
    if kind == "missing":
        return f"{name} is missing; add it"
    if kind == "string_pattern_mismatch":
        remedy = PATTERNS.get(error["ctx"]["pattern"], error["msg"])
        return f"{name} is {given!r}; {remedy}"
    if kind in ("model_type", "dict_type", "list_type"):
        return f"{name} is {given!r}; {FORMS[kind]}"
    if kind in ("int_type", "float_type") and at[-1] in NUMBERS and at[0] != "gateway":
        return f"{name} is {given!r}; {NUMBERS[at[-1]]}"
    what = error["msg"].removeprefix("Value error, ")
    what = what[:1].lower() + what[1:]
    shown = "" if isinstance(given, dict | list) else f" (it is {given!r})"
    return f"{name}: {what}{shown}"


# Remedies for values of the wrong type, by pydantic's error type.
FORMS = {
    "model_type": "write a mapping of its fields, as `name: value` lines",
    "dict_type": "write a mapping, as `name: value` lines",
    "list_type": "write a list, each item after `- `",
}

# Remedies for values that are not numbers, by field.
NUMBERS = {
    "replicas": "write an integer, or {min_replicas: 1, max_replicas: 3}",
    "silence_s": "write seconds as a number, such as 2",
    "deadline_s": "write seconds as a number, such as 30",
}


def _suggestion(at: KeyPath) -> str:
    """Return the remedy for an unknown key."""
    kind: Any = AppSpec
    is_key = False  # True where the next part is a map key or a list index
    for part in at[:-1]:
        if is_key:
            is_key = False
            continue
        field = kind.model_fields.get(str(part))
        kind = None if field is None else _model_in(field.annotation)
        if field is None or kind is None:
            return "remove it"
        is_key = typing.get_origin(field.annotation) in (dict, list)
    names = list(kind.model_fields)
    close = difflib.get_close_matches(str(at[-1]), names, n=1)
    close = close or [name for name in names if str(at[-1]) in name][:1]
    if close:
        return f"did you mean {close[0]}?"
    return f"known fields are {', '.join(names)}"


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def _dotted(at: KeyPath) -> str:
    text = ""
    for part in at:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
