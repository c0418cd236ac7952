"""Rewards completions for answering in the language of their prompts."""
