"""Code that runs inside a trainer rank: DeepSpeed, the policy network, parallelism, offloading,
checkpoints and export."""
