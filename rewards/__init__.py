"""Computes rewards with verifiers, judges and functions, and combines them into a score."""
