"""Recorders: the probability, routes and kept set of every sampled token."""
