from __future__ import annotations

import pytest

from recipes.agent.config.allow_list import AllowList, parse_allowed, parse_url


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("example.org", "https://example.org/a?b=c", True),
        ("example.org", "http://EXAMPLE.org.", True),
        ("example.org", "https://example.org:8443", False),
        ("example.org", "https://sub.example.org", False),
        ("example.org", "https://example.org.evil.com", False),
        ("example.org", "https://badexample.org", False),
        ("*.example.org", "https://a.b.example.org", True),
        ("*.example.org", "https://example.org", False),
        ("*.example.org", "https://badexample.org", False),
        ("https://example.org", "http://example.org", False),
        ("https://example.org", "https://example.org", True),
        ("http://example.org:8080", "http://example.org:8080/x", True),
        ("http://example.org:8080", "http://example.org/x", False),
        ("example.org:8080", "https://example.org:8080/x", True),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/", True),
        ("127.0.0.1:8000", "http://2130706433:8000/", False),
        ("10.0.0.0/8", "http://10.9.8.7/", True),
        ("10.0.0.0/8", "http://11.9.8.7/", False),
        ("http://[::1]:8000", "http://[::1]:8000/", True),
        ("::1", "http://[::1]/", True),
        ("müller.example", "https://xn--mller-kva.example", True),
        ("example.org", "https://example.org@evil.com/", False),
    ],
)
def test_an_entry_allows_its_own_urls_alone(entry: str, url: str, allowed: bool) -> None:
    try:
        parts = parse_url(url)
    except ValueError:
        assert not allowed
    else:
        assert AllowList([entry]).allows(parts) == allowed


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.", "a.*.org", "ftp://example.org", "https://example.org/path", "user@example.org", "a b",
     "example.org:", "example.org:0", "example.org:70000", "example.org:http", "-a.org", "https://", "a..b"],
)  # fmt: skip
def test_what_is_no_entry(entry: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_allowed(entry)


@pytest.mark.parametrize(
    "url",
    ["example.org", "ftp://example.org", "file:///etc/passwd", "https://", "https://a@b.org", "https://a.org\\@b.org",
     "https://a.org/ b", "https://a.org/\r\nHost: b.org", "http://a.org:99999/"],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_url(url)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
     "2002:7f00:1::", "nonsense"],
)  # fmt: skip
def test_private_addresses_are_reached_only_when_listed(address: str) -> None:
    assert not AllowList(["example.org", "8.8.8.8"]).reachable(address)


def test_which_private_addresses_are_reached() -> None:
    assert AllowList(["wiki.corp", "10.0.0.0/8"]).reachable("10.1.2.3")
    assert not AllowList(["wiki.corp", "10.0.0.0/8"]).reachable("127.0.0.1")
    assert AllowList(["localhost:8000"]).reachable("::1")
    assert AllowList(["example.org"]).reachable("93.184.216.34")


def test_a_path_is_written_in_ascii() -> None:
    assert parse_url("https://a.org/ä%20b?q=ö").path == "/%C3%A4%20b?q=%C3%B6"
