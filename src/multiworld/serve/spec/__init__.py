"""The YAML spec of a service, and the description of a model."""
