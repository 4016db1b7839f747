"""Which modules become units, and what is done to them before."""
