"""Estimates memory, chooses layouts, assigns GPUs, and watches the processes and nodes of a run."""
