"""Launchers: where and how the processes of a service start."""
