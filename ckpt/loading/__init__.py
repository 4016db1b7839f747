"""One load, from a manifest to live memory, and a checkpoint opened without ranks."""
