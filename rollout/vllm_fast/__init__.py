"""Faster scheduling, sampling, attention and route capture for vLLM on GPUs.

`install` is the entry point. Sampled tokens are those of vLLM's own code.
"""
