"""Proofs: revision by the policy, and tasks for verifiers."""
