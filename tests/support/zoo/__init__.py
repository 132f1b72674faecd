"""Models to split: small ones of our own, one a file, and public ones fetched as packages.

public_models    the table of public models, each a function that makes a tiny task
matrix           the table of layouts, and the outcome of one model under one layout
report           the command that runs every pair and writes the table of the docs
"""
