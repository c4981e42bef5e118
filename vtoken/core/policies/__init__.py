"""Eviction policies: what to forget. One class, one file, one method.

A policy sees one request as token ids; it knows neither blocks nor engine. It is registered by name
through the entry-point group `vtoken.policies`, so a third party can add one from another package.
docs/policies.md is the recipe.
"""

from vtoken.core.policies.base import Policy, RequestView, needs_of
from vtoken.core.policies.registry import load_policy, policy_names
from vtoken.core.scores import AttentionScores, KeyScores, Needs

__all__ = [
    "AttentionScores", "KeyScores", "Needs", "Policy", "RequestView", "load_policy", "needs_of", "policy_names",
]  # fmt: skip
