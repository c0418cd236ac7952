"""Estimate memory, choose layouts, assign GPUs, and watch the processes and nodes of a run."""
