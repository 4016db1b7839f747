"""The service around saves: when to save, what to keep, how to stop and where to resume."""
