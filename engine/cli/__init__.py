"""Words on a command line -> work, and tables for people at a terminal."""
