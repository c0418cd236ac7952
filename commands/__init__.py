"""The `keel` command line. `cli.py` parses the arguments; the other modules hold the
commands."""
