"""Reference Mixture-of-Experts model in JAX: geometry, arithmetic, training, checkpoints."""
