"""The `keel` command line. `cli.py` parses the arguments; every other module is one command."""
