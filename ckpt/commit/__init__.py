"""The commit protocol: the log of a root, sessions that append to it, and sweeps."""
