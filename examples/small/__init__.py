"""Small tasks for each agent family, for very small models and for trying out recipes. They are
generated from a seed in seconds."""
