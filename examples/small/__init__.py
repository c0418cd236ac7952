"""Small tasks of the agents' families, made from a seed in seconds: for very small models, and to
try a recipe out."""
