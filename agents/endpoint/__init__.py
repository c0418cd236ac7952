"""OpenAI-compatible endpoint per trajectory: an agent program drives, Keel records the tokens."""
