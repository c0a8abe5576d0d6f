"""gRPC front doors: convert - call - convert, nothing else."""
