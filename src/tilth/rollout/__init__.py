"""Generation engines: their protocol, and the native one, which batches continuously with the model's own modules."""
