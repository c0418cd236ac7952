"""Code that runs in an episode's process.

The environment's own interpreter runs this code, so it uses only the standard library, supports
Python 3.9 or later, and must not import anything else from Keel.
"""
