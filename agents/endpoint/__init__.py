"""An OpenAI-compatible endpoint per trajectory: an agent program drives, Keel keeps the tokens."""
