"""Memory, layouts and GPUs of a run, and the health of its processes and nodes."""
