"""One recording is enough: the first wrong tensor follows from its operands and metadata, and a clean one has none."""

import pytest
from classify import classify
from judge import Judge

from cases.generators import registry
from cases.generators.recording import Recording
from cases.generators.registry import Variant

VARIANTS = (Variant(), Variant(5, 1, first_layer=3, fault_layer=1), Variant(9, 2, first_layer=2))
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


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("identifier", [i for i, a in registry.expected().items() if a["class"] != "noise"])
def test_class_follows_from_the_recording(identifier, variant):
    answer = registry.expected(variant)[identifier]
    assert classify(registry.generate(identifier, variant, True), answer["first_bad"]) == answer["class"]
