"""Parameters of a unit as one DTensor each."""
