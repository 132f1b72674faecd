"""Public names are imported when they are first used, and are what their modules define."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import manyhands as mh
from support.paths import REPOSITORY


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_every_public_name_is_there_and_is_listed() -> None:
    assert all(getattr(mh, name) is not None for name in mh.__all__)
    assert set(mh.__all__) <= set(dir(mh))
    assert len(set(mh.__all__)) == len(mh.__all__)
    with pytest.raises(AttributeError, match="module 'manyhands' has no attribute 'Tsak'"):
        mh.Tsak
    with pytest.raises(ImportError, match="Tsak"):
        exec("from manyhands import Tsak")


def test_what_type_checkers_see_is_what_is_imported() -> None:
    tree = ast.parse((REPOSITORY / "src" / "manyhands" / "__init__.py").read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == mh._LATER
    assert set(seen) <= set(mh.__all__)


def test_importing_the_package_does_not_import_torch() -> None:
    assert run("import manyhands, sys; print('torch' in sys.modules)") == "False"
    assert run("import manyhands as mh, sys; mh.Task; print('torch' in sys.modules)") == "True"


def test_train_is_the_function_also_after_its_module_is_loaded() -> None:
    for first in ("import manyhands.train", "import manyhands.own_loop", "from manyhands import *"):
        said = run(f"{first}\nimport manyhands as mh\nprint(type(mh.train).__name__)")
        assert said == "function", first
    said = run(
        "import manyhands as mh\nmh.Run\nfrom manyhands import train\nprint(callable(train))"
    )
    assert said == "True"


def test_a_room_is_an_attribute_and_public_names_can_be_pickled() -> None:
    assert run("import manyhands as mh; print(mh.datasets.__name__)") == "manyhands.datasets"
    assert pickle.loads(pickle.dumps(mh)) is mh
    assert cloudpickle.loads(cloudpickle.dumps(lambda: mh.train))() is mh.train
    for name in mh.__all__:
        assert pickle.loads(pickle.dumps(getattr(mh, name))) is getattr(mh, name)


def test_an_embedding_that_was_unpickled_finds_rows_in_its_process(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(mh.Embedding("users of a file", dim=2)))
    said = run(
        f"import pickle, torch; model = pickle.load(open({str(file)!r}, 'rb'))\n"
        "print(tuple(model(torch.tensor([3, 4])).shape))"
    )
    assert said == "(2, 2)"
