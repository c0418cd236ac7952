"""Rewards from a judge model, for rubrics and proofs."""
