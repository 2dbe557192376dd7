"""Tables (rich) and plots (matplotlib) of a `Stats`; imported when drawn."""
