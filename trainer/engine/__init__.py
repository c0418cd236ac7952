"""One rank: DeepSpeed, the policy network, parallelism, memory given back, export."""
