"""What a power cut could leave of any training script's files, state by state, judged."""
