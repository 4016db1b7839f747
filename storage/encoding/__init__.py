"""Stores whose objects are encrypted, compressed, or both: FORMAT.md, "Encoded roots"."""
