"""What runs in vLLM's processes: a copy of this folder, beside a tokenizer.

It needs torch, and llguidance for structured output, but nothing of this package, whose
torch could replace vLLM's. Nothing here may raise in vLLM, because that would end the
engine: a failure of a sequence is reported in a file, and the sequence gets an end
token.
"""
