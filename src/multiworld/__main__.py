"""``python -m multiworld``: the same as the command ``multiworld``."""

from multiworld.cli.main import main

if __name__ == "__main__":
    main()
