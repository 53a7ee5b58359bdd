"""Tests of multiworld."""

import os

# Threads of torch sleep while they wait for each other. By default they spin, and
# beside another busy process two of them then take seven times as long on two cores.
# libgomp reads this once, when torch is imported; the processes under test inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
