"""One save, from a described state to a published checkpoint."""
