"""An OpenAI-compatible endpoint for agent programs. Programs use it to run episodes, and Keel
records the sampled tokens."""
