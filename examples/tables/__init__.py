"""Tasks for the code interpreter: tables made from a seed, and questions with computed answers."""
