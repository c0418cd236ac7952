"""Rewards programs for passing hidden tests."""
