from __future__ import annotations

import pytest

from specserve.wire.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("tcp://s3-cr_t@10.0.0.1:5000", Endpoint("tcp://10.0.0.1:5000", "s3-cr_t")),
        ("tcp://s3-cr_t@[::1]:5000", Endpoint("tcp://[::1]:5000", "s3-cr_t")),
    ],
)
def test_a_url_has_place_and_secret(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(url) == endpoint
    assert endpoint.url == url


def test_a_place_without_a_secret_is_an_open_port() -> None:
    assert Endpoint.parse("tcp://10.0.0.1:5000") == Endpoint("tcp://10.0.0.1:5000", "")


def test_the_repr_shows_no_secret() -> None:
    assert "s3cret" not in f"{Endpoint('tcp://10.0.0.1:5000', 's3cret')!r}"
