"""Code-interpreter tasks: questions about generated tables, with computed answers."""
