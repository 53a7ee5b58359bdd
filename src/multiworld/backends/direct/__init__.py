"""Our own data path for host tensors: sockets, frames, and nothing else."""
