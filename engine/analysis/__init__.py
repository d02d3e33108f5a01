"""A step that was simulated or measured, and its plan -> where its time went and what each rank waited for."""
