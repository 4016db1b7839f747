"""The arguments of each command, one module for each group of commands."""
