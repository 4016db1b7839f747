"""Programs that show how the library is used. Each of them runs as it is."""
