"""Small example tasks for recipes and tutorials."""
