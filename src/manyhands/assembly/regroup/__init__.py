"""Regrouping of an elastic run: ranks that are left, or new ones, go on from a common boundary.

epochs         a process's way through membership epochs, from one group to the next
boundaries     what the loop does at a boundary: keep the state, leave for the next epoch
rank_copy      a rank's whole state as tensors, and back into another trainer
handover       state for ranks that have none, from a peer
"""
