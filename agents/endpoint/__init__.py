"""An OpenAI-compatible endpoint for agent programs. Programs run episodes through it, and Keel
records the sampled tokens."""
