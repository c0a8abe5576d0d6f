"""Offline binaries: capture expert counts, fit the learned parts, evaluate, benchmark."""
