"""Faster scheduling, sampling, attention and route capture for vLLM on GPUs. `install` is the entry
point. The sampled tokens equal those of vLLM's own code."""
