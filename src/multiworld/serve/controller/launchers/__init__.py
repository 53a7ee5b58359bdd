"""Starting processes, locally and on Ray."""
