"""Computes reward components with verifiers, judges and functions, and combines them into a
score."""
