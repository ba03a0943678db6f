"""The cells of tutorials, how-tos and explanations run, with the hidden tests in them, and print what is saved

As `test_outputs` for modules; test_docs sees that no name in what readers see comes from a hidden cell.
The file takes long because the pages train models."""
import pytest
from test_outputs import cases,check

@pytest.mark.slow
@pytest.mark.parametrize('fn', cases(modules=False))
def test_notebook(fn, flags, pool): check(fn, flags, pool)
