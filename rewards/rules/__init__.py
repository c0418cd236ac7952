"""Rule-based verifiers, one per kind of answer."""
