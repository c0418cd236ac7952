"""Machines: the Ray cluster or this host, and GPUs reserved on them."""
