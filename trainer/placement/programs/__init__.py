"""Standalone programs that wrap or replace slow programs of Ray. They use only the standard
library."""
