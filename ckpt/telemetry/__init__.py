"""Spans, counters and the history of saves and loads."""

from ckpt.telemetry.recorder import JsonLines

__all__ = ["JsonLines"]
