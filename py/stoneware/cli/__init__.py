"""The command line, a file per command; main.py puts them together."""
