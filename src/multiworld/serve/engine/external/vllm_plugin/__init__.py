"""Code that runs in vLLM's processes, as a copy of this folder beside a tokenizer.

This code needs torch, and llguidance for structured output. It must not import
multiworld, whose torch could replace vLLM's. Nothing may raise while vLLM serves,
because an error would end the engine: a failure of a sequence is reported in a file,
and the sequence gets an end token.
"""
