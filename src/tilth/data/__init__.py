"""What a model learns from: tokenizers, prompts and supervised examples."""
