"""What a completion is worth: rule rewards and their composition."""
