"""Recorders, which save the probability, routes and sampling mask of every sampled token."""
