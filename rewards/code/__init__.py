"""Rewards programs that pass hidden tests."""
