"""Environments that are included in Keel."""
