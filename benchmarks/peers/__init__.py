"""Keel beside TRL and verl: the same model, prompts, lengths and sampling."""
