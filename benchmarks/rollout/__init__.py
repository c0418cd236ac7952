"""Sampling: an engine's tokens per second, and what recording costs."""
