"""Computes rewards with a judge model, for rubrics and proofs."""
