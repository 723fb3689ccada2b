"""What an engine's scheduler was told and what it decided, in a file; and the same decisions again, from the file. Pure."""
