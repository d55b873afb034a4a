"""The native tokenizer against the `tokenizers` package that is installed here."""

import json
import os
import pathlib
import subprocess
import sys

import make_tokenizer_cases
import tokenizers


def test_ids_of_20000_fresh_strings_agree(tmp_path, build):
    cases = make_tokenizer_cases.cases(20000, seed=77)
    assert len({json.dumps(c["ids"]) for c in cases}) > 15000  # the strings are not all alike
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    run = subprocess.run(
        [build / "tests" / "test_model", "--gtest_filter=TokenizerCases.*"],
        env={**os.environ, "ASSAY_TOKENIZER_CASES": str(file)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr
    assert f"{len(cases)} strings" in run.stdout


def test_letter_and_number_tables_are_those_of_the_package(root):
    """Every code point, through the generator; another version of the package may know another Unicode version."""
    committed = (root / "src" / "model" / "unicode_classes.inc").read_text()
    assert f"from tokenizers {tokenizers.__version__};" in committed, "regenerate: tools/generate_unicode_classes.py"
    script = root / "tools" / "generate_unicode_classes.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stdout == committed


def test_committed_cases_are_what_the_package_says():
    committed = json.loads((pathlib.Path(__file__).parent / "tokenizer_cases.json").read_text())
    assert committed == make_tokenizer_cases.cases(150, seed=1)
