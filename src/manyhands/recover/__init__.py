"""Recovery: checkpoints and run directories. Knows files, not algorithms.

    checkpoint      saves and loads snapshots: complete or absent, checked when read
    sharded_file    one safetensors file, written and read by many ranks, each its own shards
    directory       run directories: which one a run uses, and that only one live run uses it

What a snapshot holds is decided in `assembly/checkpointing.py`; when one is saved, in `train.py`.
"""
