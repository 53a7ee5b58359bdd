"""The demo: a sentence encoder in three stages behind HTTP, and everything that breaks.

Real text at a steady rate; meanwhile a replica of each stage is killed, one is stopped,
the bottleneck is scaled up and down, and the model is replaced by a new version.
"""
