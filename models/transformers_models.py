"""Imports `transformers.models` in half the time, and completes its list of language models.

When transformers is imported, it lists what the files of its models define, some 1,650 of them; and it does so again
for the package of models, because the cache of that function holds 128 folders and there are 550 (transformers 5.23).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PREFIX = "models."
# Types whose language model transformers does not list for text generation, and its class.
UNLISTED = {"mistral4": "Mistral4ForCausalLM"}


def import_models() -> None:
    """Import `transformers.models`, reusing the list of its files that transformers has already made."""
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils
    define = utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def of_models(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path).parent != folder:
            return define(path, prefix)
        listed = define(folder, prefix="models")  # The arguments of transformers' own call, so that the cache has it.
        return {
            backends: {name.removeprefix(PREFIX): names for name, names in files.items() if name.startswith(PREFIX)}
            for backends, files in listed.items()
        }

    utils.define_import_structure = of_models
    try:
        import transformers.models
    finally:
        utils.define_import_structure = define


def list_language_model(model_type: str) -> None:
    """Let transformers' auto classes find the language model of a type."""
    if model_type in UNLISTED:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(model_type, UNLISTED[model_type])
