"""Placement rules, one file each; `registry.make_policy` finds them by name."""
