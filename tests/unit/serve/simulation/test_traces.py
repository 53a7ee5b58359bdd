"""Traces of requests: formats of files, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.errors import ServeError
from multiworld.serve.simulation.pipeline import Arrival
from multiworld.serve.simulation.traces import (
    between,
    gamma,
    generated,
    read_trace,
    stretched,
)


def read(folder: Path, text: str | bytes, *, by_tokens: bool = False) -> list[Arrival]:
    path = folder / "trace.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path, by_tokens=by_tokens)


@pytest.mark.parametrize(
    "text",
    [
        "1\n2\n4\n",
        "at\n1\n2\n4\n",
        "\n\n1\n \n2\n4",
        "4\n1\n2\n",
        "1,x\r\n2,y\r\n4,z\r\n",
        "\ufeffat\n1\n2\n4\n",
        "2023-11-16 18:00:01\n2023-11-16 18:00:02\n2023-11-16 18:00:04\n",
        "2023-11-16T18:00:01Z\n2023-11-16T18:00:02Z\n2023-11-16T18:00:04Z\n",
        "2023-11-16 18:00:01.0000000\n2023-11-16 20:00:02+02:00\n2023-11-16 18:00:04.0",
        "2023-11-16 18:00:01.000000+00:00\n2023-11-16 18:00:02.0+00:00\n"
        "2023-11-16 18:00:04+00:00\n",
        '"1"\n"2"\n"4"\n',
    ],
)
def test_times_begin_at_zero_in_order(tmp_path: Path, text: str) -> None:
    assert [a.at for a in read(tmp_path, text)] == [0.0, 1.0, 3.0]


def test_work_is_relative_to_the_mean(tmp_path: Path) -> None:
    """A generated token takes twenty times as long as one of the prompt."""
    text = "at,input_tokens,output_tokens\n0,100,0\n1,0,5\n2,300,5\n"
    found = read(tmp_path, text, by_tokens=True)
    assert [a.work for a in found] == [0.5, 0.5, 2.0]
    assert [a.work for a in read(tmp_path, text)] == [1.0, 1.0, 1.0]


def test_trace_of_empty_requests_has_no_work(tmp_path: Path) -> None:
    """Nothing may be divided by zero."""
    text = "at,input_tokens\n0,0\n1,0\n"
    assert [a.work for a in read(tmp_path, text, by_tokens=True)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("at\n", "no requests"),
        ("\n \n", "no requests"),
        ("at\nmore titles\n1\n", "line 2"),
        ("1\ninf\n", "line 2"),
        ("1\nsoon\n", "line 2"),
        ("1\n,5\n", "line 2"),
        (b"at\n\xff\xfe\n", "not a CSV file"),
        ('1\n"' + "x" * 200_000 + '"\n', "not a CSV file"),
    ],
    ids=range(9),
)
def test_damage_is_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(ServeError, match=said):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0\n1\n", "no token columns"),
        ("at,tokens\n0,1\n", "no token columns"),
        ("at,input_tokens\n0\n", "line 2"),
        ("at,input_tokens\n0,1\n1,\n", "line 3"),
        ("at,input_tokens,output_tokens\n0,1,x\n", "line 2"),
    ],
)
def test_missing_tokens_are_named(tmp_path: Path, text: str, said: str) -> None:
    """Only a trace with tokens can weigh its requests."""
    with pytest.raises(ServeError, match=said):
        read(tmp_path, text, by_tokens=True)


@pytest.mark.parametrize("tokens", ["nan", "inf", "-5"])
def test_impossible_number_of_tokens_is_named(tmp_path: Path, tokens: str) -> None:
    """One NaN would make the work of every request NaN."""
    with pytest.raises(ServeError, match="line 3"):
        read(tmp_path, f"at,input_tokens\n0,1\n1,{tokens}\n", by_tokens=True)


def test_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ServeError, match=f"cannot read trace {path}"):
            read_trace(path)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_a_trace_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    try:
        found = read(tmp_path_factory.getbasetemp(), data)
    except ServeError:
        return
    assert found[0].at == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poisson",
        "poisson:",
        "poisson:rate=5",
        "poisson:seconds=5",
        "poisson:rate=-1,seconds=5",
        "poisson:rate=1,seconds=0",
        "poisson:rate=1,seconds=5,speed=3",
        "gamma:rate=1,seconds=5,cv=0",
        "gamma:rate=1,seconds=5,cv=1000",
        "poisson:rate=1,seconds=5+",
        "poisson:rate=0,seconds=5",
        "poisson:rate=1;seconds=5",
    ],
)
def test_wrong_description_shows_the_right_one(text: str) -> None:
    with pytest.raises(ServeError, match=r"poisson:rate=5|has no requests"):
        generated(text)


def test_endless_trace_is_refused(tmp_path: Path) -> None:
    """It would fill the memory, or be simulated second by second."""
    with pytest.raises(ServeError, match=r"more than 10,000,000 requests"):
        generated("poisson:rate=1e12,seconds=600")
    with pytest.raises(ServeError, match=r"longer than"):
        read(tmp_path, "1\n1e300\n")


def test_parts_follow_each_other_and_differ() -> None:
    text = (
        "poisson:rate=20,seconds=5+poisson:rate=0,seconds=10"
        "+gamma:rate=20,seconds=5,cv=2"
    )
    found = [a.at for a in generated(text, seed=1)]
    assert found == sorted(found)
    assert not [at for at in found if 5 <= at < 15]
    assert max(found) < 20
    first = [at for at in found if at < 5]
    last = [at - 15 for at in found if at >= 15]
    assert first != last
    assert found == [a.at for a in generated(text, seed=1)]
    assert found != [a.at for a in generated(text, seed=2)]


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 50), st.floats(0.1, 20), st.floats(0.05, 5), st.integers(0, 1000))
def test_generated_arrivals_are_in_order_and_within_the_length(
    rate: float, seconds: float, cv: float, seed: int
) -> None:
    times = [a.at for a in gamma(rate, seconds, cv, seed)]
    assert times == sorted(times)
    assert all(0 <= at < seconds for at in times)


def test_trace_is_cut_and_stretched() -> None:
    trace = [Arrival(0.0), Arrival(1.0, 2.0, "m"), Arrival(2.0), Arrival(3.0)]
    assert between(trace, 1.0, 3.0) == [Arrival(0.0, 2.0, "m"), Arrival(1.0)]
    assert between(trace, 5.0, 9.0) == []
    assert stretched(trace[:2], 3.0) == [Arrival(0.0), Arrival(3.0, 2.0, "m")]


def test_tokens_may_be_written_as_floats(tmp_path: Path) -> None:
    """Pandas writes floats if a value of the column is missing."""
    text = "at,input_tokens,output_tokens\n0,1155.0,7\n1,,nan\n2,-3,1e2\n"
    found = [(a.prompt, a.answer) for a in read(tmp_path, text)]
    assert found == [(1155, 7), (0, 0), (0, 100)]
