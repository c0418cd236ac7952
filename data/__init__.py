"""Prompts: their sources, order, and held-out sets."""
