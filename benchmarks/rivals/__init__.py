"""Contenders that cannot be installed beside this package; each has an environment.

The ``*_end.py`` files are scripts. They run in that environment and import nothing from
this package, because one of the contenders has its name.
"""
