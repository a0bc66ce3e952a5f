"""Tasks that come with Tilth: each file has the name of its task and declares it as ``TASK``."""
