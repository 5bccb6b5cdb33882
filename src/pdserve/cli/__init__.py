"""The command line: one file per command. Builds the objects and passes them in."""
