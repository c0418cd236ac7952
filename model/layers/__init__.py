"""Faster or more exact layers for GPUs."""
