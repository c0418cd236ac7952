"""Proof tasks: an environment in which the policy revises its proofs, and training tasks for
verifiers."""
