"""What the forward pass records: calls, where the samples are, and the rules of modules."""
