"""Code that runs in the process of an episode, in the environment's own interpreter. It supports
Python 3.9, uses only the standard library, and imports no other part of Keel."""
