"""What each stabiliser does, and how far engine and trainer are apart."""
