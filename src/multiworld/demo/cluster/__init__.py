"""Cluster demo: three tenants and two models on four Ray nodes, one of which is lost.

The tenants send real text, and one model is scaled for the bursts. Meanwhile a node is
removed with everything that runs on it and added again, one tenant floods the service,
and a third model is added and removed.
"""
