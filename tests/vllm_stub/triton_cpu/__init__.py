"""A backend of Triton that compiles nothing."""
