"""Who owns what: pure index arithmetic. No devices, no peers, no files, no clocks."""
