"""One recording is enough: the first wrong tensor follows from its operands and metadata, and a clean one has none."""

import pytest
from judge import Judge

from cases.generators import registry
from cases.generators.recording import Recording
from cases.generators.registry import Variant

VARIANTS = (Variant(), Variant(seed=5, size=1, first_layer=3, fault_layer=1), Variant(seed=9, size=2))
IDS = sorted(registry.cases())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("identifier", IDS)
def test_first_wrong_tensor_of_the_faulty_recording(identifier, variant):
    rec = registry.generate(identifier, variant, True)
    assert Judge(rec).verdict() == registry.expected(variant)[identifier]["first_bad"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("identifier", IDS)
def test_nothing_is_wrong_in_the_clean_recording(identifier, variant):
    assert Judge(registry.generate(identifier, variant, False)).verdict() is None


@pytest.mark.parametrize("name", sorted(registry.controls()))
@pytest.mark.parametrize("seed", (1, 2))
def test_nothing_is_wrong_in_the_controls(name, seed):
    a, b = Recording(), Recording()
    registry.controls()[name](a, b, Variant(seed=seed))
    assert Judge(a).verdict() is None
    assert Judge(b).verdict() is None
