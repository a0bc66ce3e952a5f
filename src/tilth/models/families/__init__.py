"""The model families that come with Tilth: a file each, which has the name of its family."""
