"""Text to learn from as it is: documents, and the windows that they are cut into."""
