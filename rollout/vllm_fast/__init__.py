"""Faster scheduling, sampling and route capture for vLLM on GPUs. `install` is the entry point. The
sampled tokens are the same as with vLLM's own code."""
