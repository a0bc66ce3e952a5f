"""Generation engines: protocol, native one, vLLM and SGLang; the worker that has one, the client that drives it."""
