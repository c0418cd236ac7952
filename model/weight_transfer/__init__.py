"""Weights on their way to the engines: buckets, the bytes' channel, the trainer's end."""
