"""Worlds on the backends of ``torch.distributed``, each around a ``ProcessGroup``."""
