"""What runs inside one trainer rank: DeepSpeed, the policy network, parallelism, offloading,
checkpoints and export."""
