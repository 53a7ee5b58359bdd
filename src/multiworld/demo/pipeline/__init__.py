"""Pipeline demo: a sentence encoder in three stages behind HTTP, broken on purpose.

Real text arrives at a steady rate. Meanwhile one replica of each stage is killed, one
is stopped, the bottleneck is scaled up and down, and a new version replaces the model.
"""
