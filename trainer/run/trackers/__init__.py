"""What else is told of a run: Weights & Biases, MLflow and trackio."""
