"""Proofs: refined until they hold by their own account, and made into tasks for verifiers."""
