"""Programs against hidden tests."""
