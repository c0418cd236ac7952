"""Runs untrusted programs and environments in isolation."""
