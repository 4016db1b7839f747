"""Parameters of a unit as one flat parameter."""
