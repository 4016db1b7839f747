"""Checkpoints looked at, checked, compared, copied and exported, without a process group."""
