"""Formats of others, written: planned files and their delivery."""
