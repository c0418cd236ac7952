"""Load prompts, order them for training, and hold some out for evaluation."""
