"""What several benchmarks share: model shapes, synthetic batches, traces, the commit."""
