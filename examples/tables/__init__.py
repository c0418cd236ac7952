"""Code-interpreter tasks: generated tables, and questions with computed answers."""
