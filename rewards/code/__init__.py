"""Rewards for programs, from hidden tests."""
