"""Array kernels of the router's reference model.

The package knows arrays and nothing else: it imports JAX and NumPy, never the
model, the router or a configuration. One folder per operation; in each folder
the same role has the same file name (see README.md).
"""
