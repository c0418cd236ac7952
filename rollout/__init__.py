"""Samples with vLLM engines, and records each token's log-probability, experts and sampling
mask."""
