"""Rewards for answering in the prompt's language."""
