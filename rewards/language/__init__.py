"""Does the policy speak its prompt's language?"""
