"""Whole jobs under one seeded scheduler: a seed decides all that happens, and replays it."""
