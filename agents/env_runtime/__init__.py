"""What runs in an episode's own process: the standard library alone, any Python from 3.9.

Nothing else of Keel's may be imported here: the interpreter is the environment's.
"""
