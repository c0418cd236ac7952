"""Replacement layers for GPUs that are faster or more exact."""
