"""Parts of a replica process shared by inference and generation."""
