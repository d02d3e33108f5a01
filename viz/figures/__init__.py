"""Plans and timelines -> figures, one chart a file: `x_info(...)` computes, `plot_x(info, text)` draws."""
