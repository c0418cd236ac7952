"""Proof tasks: an environment for revising proofs, and training tasks for verifiers."""
