"""Small tasks of the agent families, generated from a seed in seconds, for very small models and
for trying recipes."""
