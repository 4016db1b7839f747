"""Types of tensors that consist of others: torch's own, those of libraries, and shards of them.

Nothing imports this room: `ckpt.layout.composites` is the registry that finds a type here.
"""
