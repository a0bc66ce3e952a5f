"""Programs that run other engines, in an environment that has the engine and need not have Tilth."""
