"""Keel beside TRL: the same model, prompts, lengths and sampling."""
