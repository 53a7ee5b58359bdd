"""Studies: benchmarks with contenders and phases of their own, run one at a time.

``python -m benchmarks.studies.NAME`` runs one and writes ``NAME.json``.
"""
