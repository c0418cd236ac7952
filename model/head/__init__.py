"""The support head, which computes log-probabilities only over sampling masks. It runs on CPUs and,
with custom kernels, on GPUs."""
