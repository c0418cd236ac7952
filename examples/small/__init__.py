"""Small tasks for each agent family. They are generated from a seed in seconds, for very small
models and for trying out recipes."""
