"""Steps that the event loop may compute itself."""

from __future__ import annotations

from multiworld.serve.replica.sequences.short_steps import SHORT_S, WARM, ShortSteps


def test_steps_of_a_size_are_short_once_some_were() -> None:
    steps = ShortSteps()
    for _ in range(WARM):
        assert not steps.is_short(4)
        steps.add(4, SHORT_S / 2)
    assert steps.is_short(4)
    assert steps.is_short(3)  # of the same size, up to a factor of two
    assert not steps.is_short(5)
    assert not steps.is_short(1)


def test_one_long_step_makes_its_size_long_for_a_while() -> None:
    steps = ShortSteps()
    for _ in range(WARM):
        steps.add(1, SHORT_S / 2)
    steps.add(1, 2.0 * SHORT_S)
    count = 0
    while not steps.is_short(1):
        steps.add(1, SHORT_S / 2)
        count += 1
    assert 5 < count < 20
