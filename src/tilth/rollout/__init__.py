"""Episodes of several turns, and completions that a step leaves unfinished."""
