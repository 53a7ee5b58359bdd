"""Models, our engine that computes them in stages, and adapters to external engines."""
