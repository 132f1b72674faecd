"""Store of one's own: tables to create, push to and pull from without a run, as `mh.Store`."""
