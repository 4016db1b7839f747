"""Fuzzing of everything that reads bytes which others may have written."""
