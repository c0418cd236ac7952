"""Programs that wrap or replace slow parts of Ray, using only the standard library."""
