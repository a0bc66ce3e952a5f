"""The tasks that come with Tilth: a file each, which has the name of its task and declares it as ``TASK``."""
