"""Benchmarks, run by hand with `python -m benchmarks.NAME`."""
