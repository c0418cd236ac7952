"""Verifiers in processes of their own: what hangs or crashes costs its own completion."""
