"""Attention that reads what rows of a batch have in common once."""
