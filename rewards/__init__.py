"""Computes reward parts with verifiers, judges and user functions, and combines them into a
score."""
