"""Conversations for supervised fine-tuning: read, selected, rendered and split."""
