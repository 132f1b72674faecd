"""Environment check (`manyhands doctor`): one file a check, listed in order in `report.py`.

Each check tries the real thing: a port is bound and reached, two processes all-reduce 25 MB.
"""

from manyhands.cli.doctor.report import doctor

__all__ = ["doctor"]
