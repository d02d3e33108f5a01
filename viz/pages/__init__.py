"""What the engine knows and what a visitor chose -> Streamlit pages: layout and widgets, no computation."""
