"""One replica: tensors, devices, data. No peers, no sockets, no clocks."""
