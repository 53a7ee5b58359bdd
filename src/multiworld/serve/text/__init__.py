"""Tokenizers, chat templates, grammars, and names of prefixes."""
