"""The policy network: model loading, log-probabilities over sampling masks, routing replay and the
tiny MoE model."""
