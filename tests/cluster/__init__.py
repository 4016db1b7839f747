"""A cluster in a box: hosts are network namespaces, faults hit links, processes and the store."""
