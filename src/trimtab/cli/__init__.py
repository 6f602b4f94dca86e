"""The command line. One file a command: it parses, calls, prints."""
