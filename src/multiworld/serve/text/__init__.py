"""Tokenizers, chat templates, grammars, and prefix digests."""
