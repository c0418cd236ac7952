"""The support head, which computes log-probabilities only over sampling masks, on CPUs and with GPU
kernels."""
