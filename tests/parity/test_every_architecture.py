"""docs/supported_models.md and docs/parity.md say what is so."""

from __future__ import annotations

import re

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .every_architecture import assert_agrees, small_config
from .make_docs import DOCS, parity_page

PAGE = (DOCS / "supported_models.md").read_text()
SERVED = re.findall(r"`([\w-]+)`", PAGE[PAGE.index("## Served") : PAGE.index("## Admitted")])


@pytest.mark.parametrize("model_type", [name for name in SERVED if name in CONFIG_MAPPING])
def test_same_logits_as_transformers(model_type):
    assert_agrees(small_config(model_type))


def test_no_type_is_missing():
    tested = re.search(r"in transformers ([\d.]+)\.", PAGE)
    assert tested is not None
    listed = set(SERVED) | set(re.findall(r"^(?:- |\| )`([\w-]+)`", PAGE, re.MULTILINE))
    if transformers.__version__ == tested[1]:
        assert listed == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {"llama", "gemma4_text", "mixtral", "falcon", "mamba", "llama4_text"} <= listed


def test_the_parity_page_is_current():
    assert (DOCS / "parity.md").read_text() == parity_page()
