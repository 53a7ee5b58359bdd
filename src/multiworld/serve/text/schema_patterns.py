"""Conversion of JSON schemas' patterns to what llguidance enforces exactly. Pure.

llguidance matches a JSON string in its written form, with escapes. llguidance allows
`"` and a backslash even if a negated class excludes them, so this module rewrites such
a class as the list of allowed characters. llguidance drops control characters that have
no short escape, so this module refuses patterns with such characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # code points, both included

# Characters that a string can have. Of the control characters, only those with a short
# escape; DEL has none.
WRITABLE: tuple[Range, ...] = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0x10FFFF))
ESCAPED = (ord('"'), ord("\\"))

RUST_ONLY = ("&&", "--", "~~", "[")  # special only in Rust's character classes
RUST_ESCAPES = "AzZ"
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
SETS = "dDwWsSpPbB"  # escapes that do not stand for one character
LENGTHS = {"x": 2, "u": 4}  # number of hexadecimal digits, by escape


class SchemaError(ValueError):
    """A schema cannot be enforced; the error's text says why."""


def can_be_written(text: str) -> bool:
    return all(_is_within(ord(character), WRITABLE) for character in text)


def enforceable(pattern: str) -> str:
    """Convert a pattern of ECMA 262 to a pattern that llguidance enforces exactly."""
    found, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
            found.append(_class(pattern, at, end))
            at = end
            continue
        if pattern.startswith("(?", at) and pattern[at + 2 : at + 3] not in ":=!<":
            raise _foreign(pattern)
        _, end = _character(pattern, at)
        found.append(pattern[at:end])
        at = end
    return "".join(found)


def of_others(words: Iterable[str]) -> str:
    """Return a pattern of all strings except ``words``, without look-around."""
    # A word that JSON strings cannot contain need not be excluded.
    return f"^(?:{_others({word for word in words if can_be_written(word)})})$"


def _others(words: set[str]) -> str:
    heads = sorted({word[0] for word in words if word})
    any_text = f"{_allowed([])}*"
    parts = [] if "" in words else [""]
    parts.append(_allowed([(ord(head), ord(head)) for head in heads]) + any_text)
    for head in heads:
        rest = {word[1:] for word in words if word.startswith(head)}
        parts.append(f"{_numbered(ord(head))}(?:{_others(rest)})")
    return "|".join(parts)


def _class(pattern: str, begin: int, end: int) -> str:
    """Return a character class; rewrite it if llguidance would not enforce it."""
    is_negated = pattern.startswith("[^", begin)
    at = begin + 2 if is_negated else begin + 1
    ranges: list[Range] = []
    has_sets = False
    while at < end - 1:
        if pattern.startswith(RUST_ONLY, at):
            raise _foreign(pattern)
        low, at = _character(pattern, at)
        if low is None:
            has_sets = True
            continue
        high = low
        if pattern.startswith(RUST_ONLY, at):
            raise _foreign(pattern)
        if pattern[at] == "-" and at + 1 < end - 1:
            last, behind = _character(pattern, at + 1)
            if last is not None:
                high, at = last, behind
        ranges.append((low, high))
    if not is_negated or not any(_is_within(each, ranges) for each in ESCAPED):
        return pattern[begin:end]
    if has_sets:
        raise SchemaError(
            f"has the pattern {_short(pattern)}; a class that excludes a quote or a "
            "backslash together with a set such as \\s cannot be enforced"
        )
    return _allowed(ranges)


def _allowed(excluded: Sequence[Range]) -> str:
    """Return a class of all characters that can be written, except ``excluded``."""
    left = list(WRITABLE)
    for low, high in excluded:
        cut = [((a, min(b, low - 1)), (max(a, high + 1), b)) for a, b in left]
        left = [(a, b) for pair in cut for a, b in pair if a <= b]
    if not left:
        raise SchemaError("has a pattern with an empty character class")
    parts = (
        _numbered(a) if a == b else f"{_numbered(a)}-{_numbered(b)}" for a, b in left
    )
    return f"[{''.join(parts)}]"


def _numbered(code: int) -> str:
    return f"\\u{{{code:x}}}"


def _end_of_class(pattern: str, begin: int) -> int:
    at = begin + 2 if pattern.startswith("[^", begin) else begin + 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    if at >= len(pattern):
        raise SchemaError(f"has the pattern {_short(pattern)}: unclosed class")
    return at + 1


def _character(pattern: str, at: int) -> tuple[int | None, int]:
    """Return the code point at a position (None: a set), and the next position."""
    code, end = _decoded(pattern, at)
    if code is not None and not _is_within(code, WRITABLE):
        raise SchemaError(
            f"has the pattern {_short(pattern)} with the control character {code:#x}, "
            "which cannot be enforced"
        )
    return code, end


def _decoded(pattern: str, at: int) -> tuple[int | None, int]:
    if pattern[at] != "\\":
        return ord(pattern[at]), at + 1
    name = pattern[at + 1 : at + 2]
    if not name or name in RUST_ESCAPES:
        raise _foreign(pattern)
    if name in SETS:
        braces = name in "pP" and pattern.startswith("{", at + 2)
        return None, (pattern.find("}", at) + 1 or len(pattern)) if braces else at + 2
    if name in CONTROLS:
        return CONTROLS[name], at + 2
    if name == "c":
        return ord(pattern[at + 2 : at + 3] or "@") % 32, at + 3
    if name in LENGTHS:
        if name == "u" and pattern.startswith("{", at + 2):
            end = pattern.find("}", at)
            digits, end = pattern[at + 3 : max(end, at + 3)], end + 1
        else:
            end = at + 2 + LENGTHS[name]
            digits = pattern[at + 2 : end]
        try:
            return int(digits, 16), end
        except ValueError:
            raise _foreign(pattern) from None
    return ord(name), at + 2


def _is_within(code: int, ranges: Iterable[Range]) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _foreign(pattern: str) -> SchemaError:
    return SchemaError(
        f"has the pattern {_short(pattern)}, which in ECMA 262 is not valid or means "
        "something else; rewrite it"
    )


def _short(pattern: str) -> str:
    return repr(pattern[:80])
