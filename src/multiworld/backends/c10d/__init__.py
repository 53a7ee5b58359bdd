"""Worlds on ``torch.distributed``'s own backends, by composing a ``ProcessGroup``."""
