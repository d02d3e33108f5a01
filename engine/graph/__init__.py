"""A plan -> its other forms, and what waits for what in it."""
