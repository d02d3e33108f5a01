"""Timelines and results -> what is seen: figures, the player, pages, two languages."""
