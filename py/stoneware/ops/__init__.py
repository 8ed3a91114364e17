"""The ops: an op a folder, and what they share."""
