"""Rows of files, whatever the files are."""
