"""Reads, selects, renders and splits conversations for supervised fine-tuning."""
