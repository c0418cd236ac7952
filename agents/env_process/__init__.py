"""Environments in processes of their own, one for each live episode."""
