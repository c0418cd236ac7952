"""Isolation of untrusted programs and environments."""
