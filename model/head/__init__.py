"""The support head, an output layer that computes log-probabilities over sampling masks, and its
GPU kernels."""
