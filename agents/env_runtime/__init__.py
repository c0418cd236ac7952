"""Code that runs in an episode's process: standard library only, Python 3.9 or later.

It must import nothing else of Keel, since the interpreter is the environment's.
"""
