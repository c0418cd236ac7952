"""Engine throughput and the cost of recording."""
