"""What the knobs of other frameworks are called here."""
