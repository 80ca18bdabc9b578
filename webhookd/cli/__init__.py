"""The command line: parses arguments, calls the daemon's API or the layers below, and prints results."""
