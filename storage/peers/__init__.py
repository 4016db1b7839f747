"""A directory of one host as a store for others: a small HTTP server, and its far end."""
