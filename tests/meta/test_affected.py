"""Tests that ``make check`` chooses."""

from __future__ import annotations

from tests.meta.affected import FEW, ROOT, affected, every_test
from tests.meta.imports import modules


def names(*changed: str) -> set[str]:
    files = [modules().get(name, ROOT / name) for name in changed]
    found = affected(files, every_test())
    return {str(path.relative_to(ROOT / "tests")) for path in found}


def test_tests_of_a_changed_module_are_chosen() -> None:
    found = names("multiworld.serve.routing.poison_rules", "multiworld.net.frames")
    assert "unit/net/test_frames.py" in found
    assert "unit/rendezvous/test_values.py" not in found


def test_changed_test_is_chosen() -> None:
    assert names("tests/faults/test_hosts.py") == {"faults/test_hosts.py"}


def test_tests_of_a_changed_helper_are_chosen() -> None:
    found = names("tests/tiny_decoder.py")
    assert "unit/serve/engine/models/test_huggingface.py" in found


def test_few_slow_tests_are_chosen() -> None:
    found = names("multiworld.rendezvous.store_server", "multiworld.testing")
    assert 0 < sum(name.startswith("integration/") for name in found) <= FEW
    assert "README.md" not in found
    assert names("README.md") == set()
