"""Spans, counters and the history of saves and loads."""

from ckpt.telemetry.record import JsonLines

__all__ = ["JsonLines"]
