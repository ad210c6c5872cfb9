"""What tests of the page share."""

import pytest

from report_pages import Case, image_case


@pytest.fixture(scope="module")
def case() -> Case:
    return image_case()
