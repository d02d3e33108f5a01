"""A training on a large machine -> the same in small, slower by one factor."""
