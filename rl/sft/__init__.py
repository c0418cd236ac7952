"""Learning from conversations that are given: what they are, their loss, their batches."""
