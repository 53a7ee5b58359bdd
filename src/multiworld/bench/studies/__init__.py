"""Studies: benchmarks with contenders and phases of their own, run one at a time.

``python -m multiworld.bench.studies.NAME`` runs one and writes ``NAME.json``.
"""
