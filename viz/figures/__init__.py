"""Plans and timelines -> figures, one chart a file: `x_info(...)` computes, `plot_x(info, text)` draws."""

from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.figures.still import plot_picture

__all__ = ["moving_picture", "picture_info", "plot_picture"]
