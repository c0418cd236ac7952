"""Trainer benchmark: speed and memory of real steps, compared with the planner's estimates."""
