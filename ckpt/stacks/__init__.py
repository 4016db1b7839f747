"""Experts that are one tensor on one side and one for each on the other: the `stacks=` of loads."""
