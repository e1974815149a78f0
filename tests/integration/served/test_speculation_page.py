"""The page `/speculation` in a real browser, with real traffic."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageColor

from tests.integration.api import MODEL, TIMEOUT_S, Api, page_data
from tests.integration.applications import KEYS
from tests.integration.browser import CHROMIUM, Page, browsing
from tests.integration.cluster import Deployment, eventually

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on the PATH"),
]

CODE = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
BRIEF: dict[str, Any] = {"prompt": CODE * 6, "max_tokens": 40}
"""A short request: the page shows all of its steps."""

HAS_DATA = "!document.querySelector('#main').hidden"
HAS_SOURCES = "document.querySelectorAll('#sources .row').length > 0"
SHOWN_TEXTS = """[...document.querySelectorAll('.text')].map(box => [...box.childNodes]
    .filter(node => !node.classList?.contains('refused')).map(node => node.textContent).join(''))"""
LATER = """window.get ??= window.fetch
window.fetch = async (...asked) => {
  const answer = await (await get(...asked)).json()
  answer.model = '%d'
  for (const view of answer.replicas) {
    view.clock_s += %d
    for (const each of view.speculation.acceptance)
      for (const key of ['drafted', 'accepted']) each[key] = each[key].map(n => n * %d)
  }
  return new Response(JSON.stringify(answer))
}"""
"""Gives the page answers as if so many seconds had passed, with so many times the drafts."""
POOR_CONTRASTS = """(() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
  function painted(colours) {  // one over the other
    context.clearRect(0, 0, 1, 1)
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1) }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)
  }
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
  const poor = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  let count = 0
  for (let node; node = texts.nextNode();) {
    const element = node.parentElement
    if (!node.data.trim() || !element.getClientRects().length) continue
    const below = []
    for (let each = element; each; each = each.parentElement)
      below.unshift(getComputedStyle(each).backgroundColor)
    const style = getComputedStyle(element)
    const colour = element instanceof SVGElement ? style.fill : style.color
    const [dark, light] = [painted(below), painted([...below, colour])]
      .map(luminance).sort((a, b) => a - b)
    count += 1
    if ((light + 0.05) / (dark + 0.05) < 4.5) poor.push([node.data, colour, below])
  }
  return {count, poor}
})()"""
"""Texts with a contrast below WCAG's 4.5 : 1, and the number of all texts."""


@pytest.fixture
def open_app(shared: Deployment) -> Iterator[Api]:
    """A client of an application that shows texts and has served some requests."""
    api = Api(shared.base_url("/drafter"))
    with api.http:
        api.complete(**BRIEF)
        # Sampling gives a new text each time, so some of its drafts are rejected.
        api.complete(**BRIEF, temperature=1.0)
        yield api


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """An empty tab of desktop size."""
    browser.look()
    browser.requested.clear()
    browser.errors.clear()
    yield browser
    browser.open("about:blank")


@pytest.fixture
def shown(page: Page, open_app: Api) -> Page:
    """The page of `open_app`, fully drawn."""
    page.open(f"{open_app.base_url}/speculation")
    page.until(HAS_SOURCES)
    return page


@contextmanager
def traffic(api: Api) -> Iterator[None]:
    """Sends requests one after the other, for the length of a block."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            api.complete(prompt=CODE * 6, max_tokens=64, temperature=0.5)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(TIMEOUT_S)


def pixels(picture: bytes) -> set[tuple[int, ...]]:
    """Colours with many pixels in a picture."""
    with Image.open(io.BytesIO(picture)) as image:
        counted = image.convert("RGB").getcolors(1 << 24) or []
    return {colour for count, colour in counted if count > 200 and isinstance(colour, tuple)}


def test_the_page_shows_the_acceptance_of_the_api(shown: Page, open_app: Api) -> None:
    rows = shown.run("[...document.querySelectorAll('#sources .row')].map(row => row.innerText)")
    acceptance = open_app.speculation()["acceptance"]
    assert len(rows) == len(acceptance) > 0
    for source, counts in acceptance.items():
        (row,) = (each for each in rows if each.startswith(source))
        assert f"{counts['accepted_tokens']:,} of {counts['draft_tokens']:,} tokens" in row
        bars = f"document.querySelectorAll('#positions [data-source={source}] rect').length"
        assert shown.run(bars) == len(counts["drafted_at_position"])


def test_accepted_tokens_are_shown_in_the_colour_of_their_source(
    shown: Page, open_app: Api
) -> None:
    def drafted_text() -> str:
        """Empty if the drafter was late. On a busy machine it is asked again after a second."""
        before = open_app.counts("draft_model")
        answer = open_app.complete(**BRIEF, vllm_xargs={"speculation": "draft_model"})
        num_accepted = open_app.counts("draft_model").since(before).accepted_tokens
        return str(answer["choices"][0]["text"]) if num_accepted else ""

    text = eventually(drafted_text, "an answer that the drafter drafted", TIMEOUT_S)
    # The last step may have decoded more tokens than requested.
    shown.until(f"({SHOWN_TEXTS})[0]?.startsWith({text!r})")
    first = "document.querySelector('.text .accepted[data-source=draft_model]')"
    assert shown.run(f"{first}.textContent") in text
    bar = "document.querySelector('#sources [data-source=draft_model] i')"
    line = shown.run(f"getComputedStyle({first}).borderBottomColor")
    assert line == shown.run(f"getComputedStyle({bar}).backgroundColor")


def test_the_page_updates_live(shown: Page, open_app: Api) -> None:
    tokens = "document.querySelector('#sources').innerText"
    before = shown.run(tokens)
    with traffic(open_app):
        shown.until("Number(document.querySelector('#rate').textContent) > 0")
        shown.until(f"{tokens} !== {before!r}")
        shown.until("document.querySelector('#rates polyline').points.length > 2")
    shown.until("document.querySelector('#rate').textContent === '0'")


def test_the_page_can_show_the_last_minute_only(shown: Page) -> None:
    shown.run("document.querySelector('[value=minute]').click()")
    shown.until(f"!({HAS_SOURCES})")
    found = []
    for seconds, times in ((20, 2), (70, 2), (120, 3)):
        shown.run(LATER % (seconds, seconds, times))
        shown.until(f"document.querySelector('#model').textContent === '{seconds}'")
        found.append(shown.run(HAS_SOURCES))
    assert found == [True, False, True]


def test_memory_and_drafters_are_shown(shown: Page, open_app: Api) -> None:
    assert "256 MiB" in shown.run("document.querySelector('#memory').innerText")
    assert shown.run("document.querySelector('#memory-chart polyline').points.length") > 0
    # On a busy machine a drafter may be late. It is asked again after a second.
    drafters = """[...document.querySelectorAll('[data-drafter]')]
        .map(part => [part.dataset.drafter, part.querySelector('.dot').innerText])"""
    kinds = [each["kind"] for each in open_app.speculation()["sources"]]
    shown.until(f"String({drafters}) === '{','.join(f'{kind},up' for kind in kinds)}'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_readable(shown: Page, tmp_path: Path, width: int, scheme: str) -> None:
    shown.look(width=width, scheme=scheme)
    shown.until("document.querySelector('#rates svg').viewBox.baseVal.width < innerWidth")
    shown.run("document.querySelector('#refused').click()")
    shown.until("document.querySelector('.text .refused').getClientRects().length > 0")
    assert shown.run("document.documentElement.scrollWidth") <= width
    contrasts = shown.run(POOR_CONTRASTS)
    assert contrasts["poor"] == []
    assert contrasts["count"] > 50
    picture = shown.screenshot()
    (tmp_path / f"{width}-{scheme}.png").write_bytes(picture)
    names = "[[':root', '--page'], [':root', '--card'], ['[data-source=draft_model]', '--c']]"
    of = "getComputedStyle(document.querySelector(element)).getPropertyValue(name)"
    read = f"{names}.map(([element, name]) => {of})"
    wanted = {ImageColor.getrgb(colour.strip()) for colour in shown.run(read)}
    assert wanted <= pixels(picture)


def test_the_page_asks_no_other_host_and_logs_no_error(shown: Page, open_app: Api) -> None:
    paths = {"/speculation", "/speculation/data"}
    assert set(shown.requested) == {open_app.base_url + path for path in paths}
    assert shown.errors == []


def test_without_show_text_no_text_leaves_the_engine(page: Page, api: Api) -> None:
    words = api.complete(**BRIEF)["choices"][0]["text"].split()
    word = max(words, key=len)
    assert len(word) > len("def")  # request ids may contain "def"
    page.open(f"{api.base_url}/speculation")
    page.until("document.querySelectorAll('.steps .accepted').length > 0")
    assert page.run("document.querySelectorAll('.text').length") == 0
    assert word not in page.run("document.querySelector('#requests').innerText")
    (replica,) = page_data(api.http)["replicas"]
    steps = [step for request in replica["requests"] for step in request["steps"]]
    assert sum(step["num_accepted"] for step in steps) > 0
    assert {step[key] for step in steps for key in ("accepted", "own", "refused")} == {""}


KEY_A, KEY_B, *_ = KEYS.values()


@pytest.fixture
def closed(shared: Deployment) -> str:
    """URL of an application with API keys."""
    return shared.base_url("/team")


def test_data_need_a_key_and_a_tenant_sees_only_its_own_requests(closed: str) -> None:
    a, b = ({"Authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))
    with httpx.Client(base_url=closed, timeout=TIMEOUT_S) as http:

        def requests_of(headers: dict[str, str]) -> set[str]:
            replicas = page_data(http, headers)["replicas"]
            return {each["request"] for replica in replicas for each in replica["requests"]}

        assert http.get("/speculation/data").status_code == 401
        assert http.get("/speculation").status_code == 200
        before = requests_of(a)
        asked = http.post("/v1/completions", headers=a, json={"model": MODEL, **BRIEF})
        assert asked.status_code == 200, asked.text
        own = eventually(lambda: requests_of(a) - before, "the request", 60)
        assert own.isdisjoint(requests_of(b))


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(page: Page, closed: str) -> None:
    def enter(key: str) -> None:
        page.run(f"document.querySelector('form input').value = {key!r}")
        page.run("document.querySelector('form button').click()")

    page.open(f"{closed}/speculation")
    page.until("!document.querySelector('#login').hidden")
    enter("sk-nobodys")
    page.until("document.querySelector('#login-note').textContent.includes('not known')")
    enter(KEY_A)
    page.until(HAS_DATA)
    page.open(f"{closed}/speculation")
    page.until(HAS_DATA)
    assert not any("sk-" in url for url in page.requested)
