"""The policy network: loading, the support head, routing replay and the tiny MoE."""
