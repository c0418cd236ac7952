"""Rule rewards: one verifier per kind of answer, and what protects it from the answer."""
