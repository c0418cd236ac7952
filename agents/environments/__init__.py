"""Environments that come with Keel."""
