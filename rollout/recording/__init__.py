"""Recorders, which save the log-probability, routes and sampling mask of every sampled token."""
