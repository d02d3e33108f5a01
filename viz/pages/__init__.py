"""What the engine knows and what a visitor chose -> Streamlit pages. Only layout and widgets: nothing is computed here."""
