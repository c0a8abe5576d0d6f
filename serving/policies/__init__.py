"""Placement rules, one file each; `registry.make_policy` finds them by name."""

from serving.policies.registry import POLICIES, make_policy

__all__ = ["POLICIES", "make_policy"]
