"""A run's life: how it begins, stops, skips, saves and ends."""
