"""Standalone programs that wrap or replace slow ones of Ray; they use the standard library only."""
