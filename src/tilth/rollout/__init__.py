"""Generation engines: protocol, and the native one with continuous batching over the trainer's modules."""
