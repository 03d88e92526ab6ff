"""What torch.distributed opens once in a process, for its first store, is no test's leak."""

import pytest

from agoge_async.weights.groups import serve_store


@pytest.fixture(scope="session", autouse=True)
def first_store():
    """Have it opened."""
    serve_store("127.0.0.1", 10.0)
