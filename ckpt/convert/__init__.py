"""Checkpoints of other forms: export and import."""
