"""Identity of the host of this process."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from multiworld.rendezvous.membership import HostIdentity


@functools.cache
def this_host() -> HostIdentity:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return HostIdentity(boot=boot, netns=str(os.stat("/proc/self/ns/net").st_ino))
