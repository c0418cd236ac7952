"""Sampling: vLLM engines that record probability, experts and sampling mask of every token."""
