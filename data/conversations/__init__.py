"""Reads, filters, renders and splits conversations for supervised fine-tuning."""
