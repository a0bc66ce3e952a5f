"""Models: one-device decoders, attention contexts, log-probs, Hugging Face import and export."""
