"""What a machine can do: measured by `probe`, or written down in a file for a machine one does not have."""
