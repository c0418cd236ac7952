"""Trains the model: the training loop, the DeepSpeed engine, and the code that starts and places
their processes."""
