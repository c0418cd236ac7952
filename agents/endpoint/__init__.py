"""An OpenAI-compatible endpoint through which agent programs run episodes while Keel records the
sampled tokens."""
