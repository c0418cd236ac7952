"""Faster scheduling, sampling, attention and route capture for vLLM on GPUs.

`install` is the entry point. Sampled tokens equal those from vLLM's own code.
"""
