"""Rows of sparse data: libsvm files, parquet files, and row shards that are read out of core.

blocks.py           RowBlock         consecutive rows in CSR form, with their labels
libsvm.py           read_libsvm      a file as one block
                    iter_libsvm      block by block
libsvm_writer.py    write_libsvm
parquet.py          iter_parquet     numeric columns, or lists of indices and values
                    write_parquet
shards.py           RowShards        binary shards in a folder; the next is read while one is used
shard_writer.py     write_shards     from files, matrices, arrays or blocks
row_sources.py      row_blocks       what write_shards accepts, as blocks
synthetic.py        SyntheticRows    sparse logistic data of any size from a seed
"""

from manyhands.linear.data.blocks import RowBlock
from manyhands.linear.data.libsvm import iter_libsvm, read_libsvm
from manyhands.linear.data.libsvm_writer import write_libsvm
from manyhands.linear.data.parquet import iter_parquet, write_parquet
from manyhands.linear.data.row_sources import row_blocks
from manyhands.linear.data.shard_writer import write_shards
from manyhands.linear.data.shards import RowShards
from manyhands.linear.data.synthetic import SyntheticRows

__all__ = [
    "RowBlock",
    "RowShards",
    "SyntheticRows",
    "iter_libsvm",
    "iter_parquet",
    "read_libsvm",
    "row_blocks",
    "write_libsvm",
    "write_parquet",
    "write_shards",
]
