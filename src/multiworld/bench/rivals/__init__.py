"""Contenders that cannot live in this environment, each in one of its own.

The ``*_end.py`` files are scripts: they run in that environment and import nothing of
this package (one of the contenders has its name).
"""
