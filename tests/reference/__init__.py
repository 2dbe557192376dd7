"""NumPy oracles: a second opinion written from the specification, importing numpy alone."""
