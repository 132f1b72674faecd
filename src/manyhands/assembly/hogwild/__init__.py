"""Ranks that step one parameter vector: its memory, and their step counter (`merge/hogwild.py`).

common_parameters.py    parameters move to memory that all ranks share, and back
claimed_parts.py        ranks claim parts of steps, each at its own pace
"""
