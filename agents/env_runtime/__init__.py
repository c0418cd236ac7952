"""Code that runs in an episode's process.

It uses only the standard library and supports Python 3.9 or later. It must not import anything else
from Keel, because the environment's own interpreter runs it.
"""
