"""Train the model: the training loop, the DeepSpeed engine, and the code that places and starts
their processes."""
