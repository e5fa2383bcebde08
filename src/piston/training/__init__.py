"""Training: the loop, its step, its checkpoints. Never imports inference."""
