"""Replacements for model layers on GPUs. They are faster or more exact."""
