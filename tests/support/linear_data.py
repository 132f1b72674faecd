"""The libsvm sets of the tests, as scikit-learn reads them."""

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_svmlight_file

FEATURES = {"a9a": 123, "heart_scale": 13}


def libsvm(name):
    """X in CSR form, and labels -1, +1; skips the test where the file is not there."""
    path = Path(os.environ.get("MANYHANDS_DATA", "")) / "libsvm" / name
    if not path.is_file():
        pytest.skip(f"no {name}: set MANYHANDS_DATA")
    x, y = load_svmlight_file(str(path), n_features=FEATURES[name])
    x.indices, x.indptr = x.indices.astype(np.int32), x.indptr.astype(np.int32)  # for liblinear
    return x, y
