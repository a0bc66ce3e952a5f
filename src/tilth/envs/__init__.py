"""Multi-turn environments and their tools, in processes of their own. Imports no torch."""
