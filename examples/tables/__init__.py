"""Code-interpreter tasks: questions about generated tables, with answers that are computed."""
