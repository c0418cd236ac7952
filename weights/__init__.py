"""Weight transfer to the engines: buckets, the channel for their bytes, the trainer's end."""
