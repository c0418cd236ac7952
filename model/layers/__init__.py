"""Faster or more exact replacements for model layers on GPUs."""
