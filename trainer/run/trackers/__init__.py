"""Experiment trackers: Weights & Biases, MLflow and trackio."""
