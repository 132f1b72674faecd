"""Snapshots of a server's tables: copied in bounded pieces while pushes go on, and put back.

row_pieces       lists the rows of a range of hashes, changed since a version; loads them
copy_on_write    keeps what a push overwrites while a snapshot has not copied it yet
piece_file       the file of one table on one shard: pieces with checksums
shard_snapshot   the thread that copies the tables of one shard
table_reader     finds rows in such files by memory map; puts together full and incremental ones
"""
