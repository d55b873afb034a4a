"""The recorded arrays hold the cause: it can be fitted from the faulty run, and not from its clean twin."""

import fits
import fits_attention  # noqa: F401
import fits_memory  # noqa: F401
import fits_weights  # noqa: F401
import pytest
from fits import FITS

from cases.generators import registry
from cases.generators.registry import Variant

VARIANTS = (Variant(), Variant(5, 1, first_layer=3, fault_layer=1), Variant(9, 2, first_layer=2))
FAULTS = sorted(i for i, a in registry.expected().items() if a["class"] != "noise")


def matches(value, constant) -> bool:
    if constant is None:
        assert isinstance(value, (bool,)) or type(value).__name__ in ("bool", "bool_")
        return bool(value)
    wanted = [constant["value"], *constant.get("also", [])]
    return value is not None and any(abs(value - w) <= max(constant["tolerance"] * abs(w), 1e-6) for w in wanted)


def test_every_fault_has_a_fit():
    assert sorted(fits.FITS) == FAULTS


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("identifier", FAULTS)
def test_cause_is_in_the_faulty_recording_alone(identifier, variant):
    answer = registry.expected(variant)[identifier]
    name = answer["first_bad"]
    layer = ".".join(name.split(".")[:2]) + "." if name.startswith("layers.") else variant.layer(0)
    clean, faulty = (registry.generate(identifier, variant, x) for x in (False, True))
    assert matches(FITS[identifier](faulty, layer, variant), answer["constant"])
    assert not matches(FITS[identifier](clean, layer, variant), answer["constant"])
