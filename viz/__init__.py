"""Timelines -> what a person sees: figures, the player that moves them, and the pages that show them."""
