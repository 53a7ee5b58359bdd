"""The ``multiworld`` command. Thin: it parses, calls, prints and sets the exit code."""
