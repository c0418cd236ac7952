"""Runs multi-turn conversations with environments and tools, and manages their context."""
