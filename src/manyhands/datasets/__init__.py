"""Small real data sets for the demo, the examples and the tests, as tensors that a `Task` accepts.

pictures.py     fashion_mnist()    70,000 pictures of clothes, [N, 1, 28, 28]
                                   from a folder, the cache or its home on GitHub
                digits()           1,797 handwritten digits, enlarged to the same shape
                                   inside scikit-learn, no network
                images()           the first of the two that is found, and its name
characters.py   tinyshakespeare()  1.1 million characters in rows of `block`
                                   from a folder; else synthetic sentences
                text()             the same, and its name
tabular.py      adult()            48,842 people of a census, as ids and numbers, and whether
                                   they earn more than 50K; from a folder
                open_bandit()      60,000 pieces of clothing shown in a shop and whether they
                                   were clicked; from a folder
                clicks()           one of the two, or synthetic rows; and its name
folders.py      where to search: the folder given, $MANYHANDS_DATA, the user's cache
"""

from manyhands.datasets.characters import text, tinyshakespeare
from manyhands.datasets.folders import DatasetNotFound, cache
from manyhands.datasets.image_data import (
    FASHION_MNIST_SHA256,
    digits,
    fashion_mnist,
    images,
    read_idx,
)
from manyhands.datasets.tabular import adult, clicks, hashed, made_up_clicks, open_bandit

__all__ = [
    "FASHION_MNIST_SHA256",
    "DatasetNotFound",
    "adult",
    "cache",
    "clicks",
    "digits",
    "fashion_mnist",
    "hashed",
    "images",
    "made_up_clicks",
    "open_bandit",
    "read_idx",
    "text",
    "tinyshakespeare",
]
