"""Child processes: their start, messages, output and end."""
