"""Checkpoints for trainers and loaders of other libraries, one file per library.

Nothing else in the package imports these files, and each imports its library: install the extra
`[huggingface]`, `[lightning]` or `[data]` for the one that you use.
"""
