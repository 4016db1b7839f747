"""The training engine that will stand on `ckpt`: flat parameters, shards, collectives.

Nothing is here yet. Models are sharded with torch's own engines, which `ckpt` serves as they are.
"""
