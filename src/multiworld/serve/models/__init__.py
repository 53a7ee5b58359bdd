"""Models from elsewhere, cut into stages."""
