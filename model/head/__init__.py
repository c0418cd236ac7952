"""The support head: log-probabilities over kept sets alone, on CPUs and as GPU kernels."""
