"""What an op costs: a machine, and the seconds that compute and communication take on it."""
