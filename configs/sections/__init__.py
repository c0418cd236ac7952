"""The sections of a recipe, one per file. `configs/schema.py` combines them."""
