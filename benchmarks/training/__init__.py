"""The trainer: speed and memory of real steps, and the planner's model of them."""
