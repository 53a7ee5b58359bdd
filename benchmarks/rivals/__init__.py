"""Contenders that cannot be installed beside this package; each has an environment.

The ``*_end.py`` files are scripts that run in the environment of their contender. They
import nothing from this package, because one contender has the same package name.
"""
