"""Streams of tokens: chain selection, recovery, moves and delivery."""
