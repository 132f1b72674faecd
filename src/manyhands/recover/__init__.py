"""When things break: snapshots on disk and who is still here. Knows files, not algorithms."""
