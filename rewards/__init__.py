"""Rewards: verifiers, judges and functions, and their composition into a score."""
