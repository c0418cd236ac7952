"""A small mixture of experts that is built, taught and kept here: no download, any machine."""
