"""Hot copies: rows that are asked for far more often than others are copied to all servers.

    hot_ids        the owner of a row finds and drops hot ids by measured load
    copy_refresh   every server asks the others for their hot rows, again and again
    held_copies    what came, with its age; workers read it, and what is too old is not served
    hot_reads      the worker's side: which ids are hot, and when a copy will not do

Pushes go to the owner, which applies and acknowledges them as ever; copies are only read. So a copy
that is lost, with its server or otherwise, costs one more request and nothing else.
"""
