"""Formats of others, read: names, values, tensors on request."""
