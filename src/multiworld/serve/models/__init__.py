"""Model factories: existing models, cut into stages."""
