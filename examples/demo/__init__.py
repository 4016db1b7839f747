"""A training that is killed in the middle of a save, and what comes after."""
