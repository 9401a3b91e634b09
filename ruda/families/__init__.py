"""Model families: what is known of them, by name."""
