"""Training of the reference model and the measurements behind its card."""
