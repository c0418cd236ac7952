"""Computes reward components with verifiers, judges and user functions, and combines them into a
score."""
