"""Adapters that drive inference engines, one Protocol for all of them."""
