"""Code that runs in an episode's process, in the environment's own interpreter. It supports Python
3.9, uses only the standard library, and imports nothing else from Keel."""
