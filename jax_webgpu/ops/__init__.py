"""The operators: one file each, in one order."""
