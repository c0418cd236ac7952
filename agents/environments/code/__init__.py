"""Repositories before a change that the policy is to make, graded by hidden tests."""
