"""Rewards a completion for answering in the language of its prompt."""
