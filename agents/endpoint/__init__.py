"""OpenAI-compatible endpoint through which agent programs run episodes, with all sampled tokens
recorded for training."""
