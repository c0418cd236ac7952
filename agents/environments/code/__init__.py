"""Repositories as they were before a change, which the policy is to make; hidden tests grade it."""
