"""The engine that speaks: continuous batching over a KV cache, with the model's own modules and math."""
