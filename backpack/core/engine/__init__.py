"""What a backward pass does: it walks the recorded calls, and extracts quantities."""
