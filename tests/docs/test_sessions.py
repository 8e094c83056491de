"""What the documents show of the command line is what it prints."""

import pytest
import refresh
from support.markdown import called, pages_with


@pytest.mark.torch
@pytest.mark.parametrize("page", pages_with("console"), ids=called)
def test_sessions_are_what_is_printed(page, filled):
    """A session shows what its commands print, but for numbers. `python dev.py docs --refresh` writes them."""
    assert refresh.alike(refresh.refreshed(page, filled)) == refresh.alike(page.read_text(encoding="utf-8"))
