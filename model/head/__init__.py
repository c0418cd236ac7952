"""The support head: log-probabilities over sampling masks alone, on CPUs and as GPU kernels."""
