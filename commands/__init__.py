"""The `keel` command. `cli.py` parses arguments, and each other file implements one command."""
