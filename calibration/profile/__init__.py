"""Captures of paper-sized models without the models: real texts through real routing tables."""
