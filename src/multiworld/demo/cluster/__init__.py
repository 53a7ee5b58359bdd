"""The demo of a cluster: two models on four Ray nodes, and one node is lost.

Real text at a steady rate to both; meanwhile a node is taken away with all that runs on
it, it comes back, and a third model is added and removed.
"""
