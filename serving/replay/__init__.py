"""Deterministic discrete-event replay around the server's own core: traces in, comparisons out."""
