"""Samples with vLLM engines and records each token's probability, experts and sampling mask."""
