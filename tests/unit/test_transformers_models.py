"""transformers' package of models is the same when its files are listed only once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from swiftopt.models.transformers_models import import_models
import transformers
from transformers.utils import import_utils
define, listed = import_utils.define_import_structure, []
read = import_utils.create_import_structure_from_path
import_models()
n_misses = read.cache_info().misses
import_models()
models = sys.modules["transformers.models"]
print(import_utils.define_import_structure is define, read.cache_info().misses == n_misses)
by_itself = import_utils._LazyModule("x", models.__file__, define(models.__file__), module_spec=models.__spec__)
print(models._import_structure == by_itself._import_structure, len(models._import_structure) > 100)
print(read.cache_info().misses > n_misses + 100)
from transformers import LlamaConfig
print(transformers.models.llama.LlamaConfig is LlamaConfig)
"""


def test_models_of_transformers_are_listed_once_and_as_by_itself() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 6, done.stderr
