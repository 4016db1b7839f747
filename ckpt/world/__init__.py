"""Ranks talking to each other: control rounds with deadlines, liveness, exchanges of bytes."""
