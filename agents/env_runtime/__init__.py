"""Code that runs inside an episode's process, with the environment's own Python interpreter. It
supports Python 3.9, needs only the standard library, and imports nothing else of Keel."""
