"""Rule-based verifiers, one for each kind of answer."""
