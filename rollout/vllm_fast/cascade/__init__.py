"""Attention that reads the prompt shared by a group only once."""
