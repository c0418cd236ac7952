"""Samples with vLLM engines, which record the probability, experts and sampling mask of every
token."""
