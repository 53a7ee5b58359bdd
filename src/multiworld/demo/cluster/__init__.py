"""The demo of a cluster: three tenants, two models, four Ray nodes; one node is lost.

Real text in bursts, which one model is scaled for; meanwhile a node is taken away with
all that runs on it, it comes back, one tenant floods the others, and a third model is
added and removed.
"""
