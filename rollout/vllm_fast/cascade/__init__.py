"""Attention that reads the shared prompt of a group once."""
