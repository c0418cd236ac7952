"""Runs programs that nobody vouches for."""
