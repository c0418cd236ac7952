"""Comparison of Keel with TRL and verl on the same model, prompts, lengths and sampling."""
