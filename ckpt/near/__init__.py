"""Checkpoints on the hosts themselves: near tiers, their log, and the way back from it."""
