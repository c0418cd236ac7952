"""Measurements, run by hand: `python -m benchmarks.NAME`. Nothing here is a test."""
