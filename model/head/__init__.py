"""The support head, which computes log-probabilities over sampling masks, and its GPU kernels."""
