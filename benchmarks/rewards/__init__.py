"""Rewards: verifiers, the sandbox, the language rule."""
