"""A spec -> a real run: everything that imports torch, but for the modes' own `run.py`."""
