"""Fetches the libraries of the dashboard's page: ``python -m tests.meta.vendored``.

It needs npm, and refuses a package whose content is not the one that is pinned here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from multiworld.serve.dashboard.server import PAGE

# Package: version, SHA-512 as npm publishes it, and target names of the copied files.
PACKAGES = {
    "htm": (
        "3.1.1",
        "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5D"
        "GAvxNQ==",
        {"preact/standalone.module.js": "htm-preact.js", "LICENSE": "htm.LICENSE"},
    ),
    "preact": (  # htm's file contains it
        "11.2.0",
        "/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxM"
        "PZ7xBg==",
        {"LICENSE": "preact.LICENSE"},
    ),
}

# SHA-256 of each file in ``page/vendor``.
DIGESTS = {
    "htm-preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "htm.LICENSE": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f4"
    "12b179b456630790d30b2ec9a8e4b7d4",
}


def main() -> None:
    """Fetch all packages, and write their files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (version, digest, files) in PACKAGES.items():
            command = ["npm", "pack", "--silent", f"{name}@{version}"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            content = (Path(folder) / f"{name}-{version}.tgz").read_bytes()
            found = base64.b64encode(hashlib.sha512(content).digest()).decode()
            if found != digest:
                raise SystemExit(f"{name} {version} is not what is pinned: {found}")
            with tarfile.open(fileobj=io.BytesIO(content)) as package:
                for source, target in files.items():
                    file = package.extractfile(f"package/{source}")
                    assert file is not None
                    (PAGE / "vendor" / target).write_bytes(file.read())


if __name__ == "__main__":
    main()
