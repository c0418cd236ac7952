"""Faster layers of the network on a GPU."""
