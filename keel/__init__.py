"""Keel: RL post-training for language models. The sub-packages are the folders beside this one.

In a checkout they are links to the folders at its top; an installed package has them here.
"""
