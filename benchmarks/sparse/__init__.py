"""Sparse attention: what it keeps of dense attention's quality, and what it costs."""
