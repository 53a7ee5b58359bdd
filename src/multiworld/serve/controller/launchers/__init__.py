"""Launchers, which start processes locally and on Ray."""
