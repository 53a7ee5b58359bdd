"""Parts of a replica process that both kinds of work use."""
