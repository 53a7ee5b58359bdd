"""Security from the environment, proofs, and backends that would bypass it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld import ConfigError, Security, Tls

SECRET = b"a secret long enough to be one"
SEALED = Security(secret=SECRET)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def test_empty_environment_switches_everything_off() -> None:
    found = Security.from_environment({})
    assert found == Security()
    assert (found.secret, found.tls) == (b"", None)


def test_secret_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    """A file may end with a newline, as editors write it."""
    text = SECRET.decode()
    assert Security.from_environment({"MULTIWORLD_SECRET": text}).secret == SECRET
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    found = Security.from_environment({"MULTIWORLD_SECRET_FILE": str(file)})
    assert found.secret == SECRET
    assert found.tls is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MULTIWORLD_SECRET": ""}, "must not be empty"),
        ({"MULTIWORLD_SECRET": "short"}, "16 bytes"),
        ({"MULTIWORLD_SECRET_FILE": "/no/such/file"}, "readable file"),
        ({"MULTIWORLD_SECRET_FILE": "/"}, "readable file"),
        ({"MULTIWORLD_SECRET_FILE": "/dev/null"}, "holds no secret"),
        (
            {"MULTIWORLD_SECRET": "x" * 20, "MULTIWORLD_SECRET_FILE": "/dev/null"},
            "not both",
        ),
        ({"MULTIWORLD_TLS_CERT": "/c"}, "MULTIWORLD_TLS_KEY"),
        ({"MULTIWORLD_TLS_CERT": "/c", "MULTIWORLD_TLS_KEY": "/k"}, "TLS_CA"),
        (
            {
                "MULTIWORLD_TLS_CERT": "/no/c",
                "MULTIWORLD_TLS_KEY": "/no/k",
                "MULTIWORLD_TLS_CA": "/no/a",
            },
            "PEM",
        ),
    ],
)
def test_wrong_settings_are_named(environment: dict[str, str], said: str) -> None:
    """A process never starts with less security than was asked for."""
    with pytest.raises(ConfigError, match=said):
        Security.from_environment(environment)


def test_empty_name_of_the_secret_file_is_refused() -> None:
    """A variable that a script failed to fill must not switch the secret off."""
    with pytest.raises(ConfigError):
        Security.from_environment({"MULTIWORLD_SECRET_FILE": ""})


def test_secret_that_is_not_utf8_is_a_config_error() -> None:
    """The environment may hold any bytes, which Python shows as lone surrogates."""
    text = b"\xff\xfe not utf-8, but long enough".decode(errors="surrogateescape")
    with pytest.raises(ConfigError):
        Security.from_environment({"MULTIWORLD_SECRET": text})


def test_error_and_repr_do_not_show_the_secret() -> None:
    """Logs are read by more people than secrets."""
    assert "long enough" not in repr(SEALED)
    with pytest.raises(ConfigError) as refused:
        Security(secret=b"tiny secret")
    assert "tiny" not in str(refused.value)


def test_tls_files_are_checked_when_the_environment_is_read(tls: Tls) -> None:
    names = ("MULTIWORLD_TLS_CERT", "MULTIWORLD_TLS_KEY", "MULTIWORLD_TLS_CA")
    files = (tls.certificate, tls.key, tls.authority)
    environment = dict(zip(names, map(str, files), strict=True))
    assert Security.from_environment(environment).tls == tls
    environment["MULTIWORLD_TLS_KEY"] = str(tls.authority)
    with pytest.raises(ConfigError, match="PEM"):
        Security.from_environment(environment)


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1), json_values, json_values)
def test_proof_holds_for_its_role_and_parts_only(
    role: str, part: object, other: object
) -> None:
    proof = SEALED.proof(role, part)
    assert SEALED.is_proof(proof, role, part)
    assert not SEALED.is_proof(proof, role + "x", part)
    assert not SEALED.is_proof(proof, role, [part, other])
    assert not SEALED.is_proof(proof, role, part, other)
    assert not Security(secret=SECRET[::-1]).is_proof(proof, role, part)


@pytest.mark.parametrize("proof", [None, 0, True, [], {}, "", "é", "0" * 64, b"x"])
def test_anything_else_is_no_proof(proof: object) -> None:
    """The value comes from a peer and may be of any type."""
    assert not SEALED.is_proof(proof, "dialer", {"kind": "link"})


def test_proof_that_is_no_unicode_is_no_proof() -> None:
    """JSON can contain a lone surrogate, which UTF-8 cannot."""
    assert not SEALED.is_proof("\ud800", "dialer", {"kind": "link"})


def test_backends_that_bypass_security_are_refused(tls: Tls) -> None:
    """With TLS, nothing allows them; with a secret, only an explicit setting does."""
    for backend in ("direct", "memory"):
        SEALED.check_backend(backend)
        Security(tls=tls).check_backend(backend)
    Security().check_backend("gloo")
    with pytest.raises(ConfigError, match="OPEN_BACKENDS"):
        SEALED.check_backend("gloo")
    allowed = {"MULTIWORLD_SECRET": SECRET.decode(), "MULTIWORLD_OPEN_BACKENDS": "1"}
    Security.from_environment(allowed).check_backend("gloo")
    with pytest.raises(ConfigError, match="cannot encrypt"):
        Security(secret=SECRET, tls=tls, open_backends=True).check_backend("nccl")


def test_certificate_without_its_new_key_leaves_the_old_ones(
    tls: Tls, tmp_path: Path
) -> None:
    """Renewal writes one file after the other."""
    paths = [tmp_path / name for name in ("certificate", "key", "authority")]
    for path, old in zip(paths, (tls.certificate, tls.key, tls.authority), strict=True):
        path.write_bytes(old.read_bytes())
    copied = Tls(certificate=paths[0], key=paths[1], authority=paths[2])
    before = copied.context(is_server=True)
    paths[0].write_text("half of a certificate")
    assert copied.context(is_server=True) is before
    paths[0].write_bytes(tls.certificate.read_bytes())
    assert copied.context(is_server=True) is not None
    with pytest.raises(ConfigError):
        Tls(certificate=paths[1], key=paths[1], authority=paths[2]).context(
            is_server=True
        )


def test_secret_that_is_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="give bytes") as caught:
        Security(secret="a secret of enough characters")  # type: ignore[arg-type]
    assert "enough" not in str(caught.value)
