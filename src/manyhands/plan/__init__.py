"""Plan: what to run, from `key=value` words to a checked plan, and the memory it needs.

words.py            parses, resolves and prints plan words
vocabulary.py       every word, its type and choices, known without torch
reading.py          reads and checks keys and values; the command line's first look at a plan
foreign_words.py    words of other trainers, and ours for each
checks.py           refuses words that are impossible together or without effect
memory_forecast.py  bytes that a rank will need at its peak
memory_timeline.py  storages of one step over time, from a dry run on fake tensors
static_memory.py    parameters, buffers, state of optimizer and strategy, from shapes
memory_fit.py       refuses a plan that does not fit, and finds a change that does
"""
