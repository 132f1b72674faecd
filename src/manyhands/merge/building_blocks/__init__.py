"""Building blocks of merge strategies: what several algorithms in `merge/` share.

options        checks of hyper-parameters, with errors in the plan's words
local_steps    a block of local steps, the mean update, what becomes of optimizer state
elastic        the pull strength alpha of elastic averaging
server_model   the model as rows of a parameter server
topology       gossip graphs as weight matrices
gossip         sending to neighbours while computing, and mixing what arrives
aggregate      robust means of many vectors
"""
