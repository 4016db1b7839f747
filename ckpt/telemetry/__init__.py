"""Spans, counters and the history of saves and loads."""
