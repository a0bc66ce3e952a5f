"""Training service: Tinker's API over Tilth's own engines, for many clients that share one base model."""
