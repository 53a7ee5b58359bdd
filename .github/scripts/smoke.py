"""Smoke test of an installed wheel, run by an environment that has nothing else.

python -I smoke.py worlds README.md   # with no extra: the program in the README
python -I smoke.py serve              # with the extra [serve]: one service, one request
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

PROGRAM_S = 120
"""Maximum seconds for a command."""

READY_S = 120
"""Maximum seconds until the service is ready."""

MODEL = """\
from multiworld.serve import Model, Stage, TensorSpec


def load(context):
    return lambda tensors: {"y": tensors["x"] * 2}


def model():
    return Model(
        stages=[Stage(name="double", load=load)],
        inputs=[TensorSpec("x", "FP32", (-1, 2))],
        outputs=[TensorSpec("y", "FP32", (-1, 2))],
    )
"""

SPEC = """\
app: smoke
models:
  double:
    factory: smoke_model:model
    stages: [{{name: double, replicas: 2}}]
gateway: {{port: {port}}}
"""

REQUEST = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}]
}


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command() -> str:
    """Return the path of the installed ``multiworld`` command."""
    return str(Path(sys.executable).parent / "multiworld")


def check_package() -> None:
    """Check where the package is imported from, its names and its version."""
    import multiworld

    assert Path(multiworld.__file__).is_relative_to(sys.prefix), multiworld.__file__
    assert version("multiworld-elastic") == multiworld.__version__
    for name in multiworld.__all__:
        getattr(multiworld, name)
    shown = subprocess.run(
        [command(), "--version"], capture_output=True, text=True, check=True
    )
    assert multiworld.__version__ in shown.stdout, shown.stdout


def check_worlds(readme: Path, folder: Path) -> None:
    """Run ``multiworld doctor`` and the README's program, which loses a worker."""
    subprocess.run([command(), "doctor"], check=True, timeout=PROGRAM_S)
    text = readme.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"It prints:\n\n((?:    .*\n)+)", text)
    program = folder / "readme.py"
    program.write_text(code.replace("29500", str(free_port())))
    done = subprocess.run(
        [sys.executable, "-I", str(program)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    expected = re.sub("^    ", "", printed, flags=re.MULTILINE)
    assert done.stdout == expected, f"{done.stdout}\n{done.stderr}"


def check_serve(folder: Path) -> None:
    """Serve a model, and compare the answer to one request."""
    port = free_port()
    (folder / "smoke_model.py").write_text(MODEL)
    (folder / "app.yaml").write_text(SPEC.format(port=port))
    service = subprocess.Popen(
        [command(), "serve", "app.yaml", "--state", str(folder / "state")], cwd=folder
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/v2/health/ready", service)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v2/models/double/infer",
            data=json.dumps(REQUEST).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
        assert answer["outputs"][0]["data"] == [3.0, 4.0], answer
    finally:
        service.send_signal(signal.SIGINT)
        try:
            service.wait(30)
        except subprocess.TimeoutExpired:
            service.kill()
            raise


def wait_until_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    """Return once ``url`` answers 200.

    Raises:
        AssertionError: The service exited, or is not ready within ``READY_S``.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert service.poll() is None, f"serve exited with {service.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer 200 within {READY_S} s")


def main() -> int:
    """Run the checks; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    checks = parser.add_subparsers(dest="check", required=True)
    worlds = checks.add_parser("worlds", help="the package without extras")
    worlds.add_argument("readme", type=Path, help="README.md of the same version")
    checks.add_parser("serve", help="the package with the extra [serve]")
    given = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    check_package()
    with tempfile.TemporaryDirectory() as folder:
        if given.check == "worlds":
            check_worlds(given.readme, Path(folder))
        else:
            check_serve(Path(folder))
    sys.stdout.write(f"smoke test {given.check}: passed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
