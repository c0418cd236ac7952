"""Read, filter, render and split conversations for supervised fine-tuning."""
