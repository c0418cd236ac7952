"""Small task families that recipes and tutorials use."""
