"""Training data: tokenizers, prompts and supervised examples."""
