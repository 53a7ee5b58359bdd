"""The ``direct`` data path for host tensors, over sockets and shared memory."""
