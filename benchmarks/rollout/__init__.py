"""Measures engine throughput and how much recording costs."""
