"""The command line: long commands have files of their own, and main.py registers all."""
