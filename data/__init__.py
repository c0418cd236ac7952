"""Loads prompts, puts them in training order, and sets some aside for evaluation."""
