"""Read rows from data files in any supported format."""
