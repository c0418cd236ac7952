"""Rewards for programs that pass hidden tests."""
