"""The policy network: model loading, the support head, routing replay and the tiny MoE model."""
