"""New weights into a running engine, by copies straight into its tensors."""
