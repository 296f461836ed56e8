"""Pictures, film and sound: where they are, how they are decoded, and how they reach a batch."""
