"""Checkpoints of other forms: export and import, and what these are told about a source."""

from ckpt.convert.sources.dequantized import Dequantize

__all__ = ["Dequantize"]
