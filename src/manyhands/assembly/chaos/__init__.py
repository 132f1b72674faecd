"""What a rank does where `manyhands chaos` watches its run: frame faults, and a ledger."""
