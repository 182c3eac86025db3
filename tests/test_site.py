"""The built site, opened in a real browser: what a reader on a laptop or a phone, by day or by night, gets.

Run by `make test` after the book was built. Without a Chromium the browser tests are skipped with a plain
message; with CI=true they fail instead.
"""

from __future__ import annotations

import functools
import html
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import nbformat
import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

import tokenbytoken as tbt

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_build" / "html"
PROBE = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {"laptop": (1280, 900), "phone": (390, 844)}


def documents() -> list[str]:
    """The pages that the table of contents names, without their suffix."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"]] + [entry["file"] for part in toc["parts"] for entry in part["chapters"]]


DOCUMENTS = documents()
CHAPTERS = [name for name in DOCUMENTS if re.fullmatch(r"book/\d\d_\w+", name)]


# ------------------------------------------------------------------ the site, served; a browser to open it


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").exists():
        if os.environ.get("CI") == "true":
            pytest.fail("the site is not built: `make book` comes before these tests")
        pytest.skip("the site is not built: run `make book` first")
    return SITE


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


expect.set_options(timeout=20_000)  # ms; a busy machine may need seconds for what an idle one does at once


# Scrollbars that take room, as they do on most desktops; Playwright would hide them, and what they do to a page.
BAR = """() => {
  const box = document.body.appendChild(document.createElement("div"));
  box.style.overflow = "scroll";
  return box.offsetHeight - box.clientHeight;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium was found, and CI never skips the browser tests")
        pytest.skip("no Chromium was found: install one (apt-get install chromium) to test the site in a browser")
    with sync_playwright() as playwright:
        # Inside a container root has no sandbox; only pages of this repository are opened.
        opened = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], ignore_default_args=["--hide-scrollbars"]
        )
        yield opened
        opened.close()


class Visit:
    """A tab in which one page after another is opened; what went wrong since the last opening is kept.

    One for all tests: what the pages share is then fetched and compiled once, not once a page.
    """

    def __init__(self, browser: Browser, host: str) -> None:
        self.host = host
        # Reduced motion: a colour read in the middle of its transition would be neither theme's.
        self.context = browser.new_context(reduced_motion="reduce")
        self.page: Page = self.context.new_page()
        self.bar: int = self.page.evaluate(BAR)
        self.foreign: list[str] = []
        self.missing: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda r: self.foreign.append(r.url) if not self._own(r.url) else None)
        self.page.on("response", lambda r: self.missing.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _own(self, address: str) -> bool:
        return address.startswith((self.host, "data:", "blob:"))

    def open(self, name: str, width: str = "laptop") -> Page:
        for faults in (self.foreign, self.missing, self.complaints):
            faults.clear()
        self.resize(*WIDTHS[width])
        self.page.emulate_media(media="screen", color_scheme="light")
        self.page.goto(urljoin(self.host, name), wait_until="load")
        self.page.evaluate("async () => { await window.MathJax?.startup?.promise; }")
        return self.page

    def resize(self, columns: int, rows: int = 900) -> None:
        self.page.set_viewport_size({"width": columns, "height": rows})

    def paint(self, scheme: str) -> None:
        """Change between day and night, as the reader's system does."""
        self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        self.page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)

    def probe(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(PROBE)
        return found

    def sound(self) -> None:
        assert not self.complaints, self.complaints
        assert not self.foreign, f"asks other hosts: {self.foreign}"
        assert not self.missing, self.missing


@pytest.fixture(scope="module")
def visit(browser: Browser, host: str) -> Iterator[Visit]:
    visit = Visit(browser, host)
    yield visit
    visit.context.close()


def test_scrollbars_take_room(visit: Visit) -> None:
    """Without bars that take room, no test below would see a formula that has one."""
    assert visit.bar >= 10


# Each of the four once, with as few changes as that takes: a change of theme costs as much as a page's layout.
VIEWS = (("phone", "light"), ("phone", "dark"), ("laptop", "dark"), ("laptop", "light"))


@pytest.mark.parametrize("name", [*DOCUMENTS, "search", "genindex"])
def test_page(visit: Visit, name: str) -> None:
    """No complaint, no other host, no raw TeX, no sideways scroll, nothing faint, by day and by night."""
    page = visit.open(f"{name}.html", "phone")
    toggle(page, "primary").click()
    expect(drawer(page, "primary"), f"{name}: the list of chapters does not open").to_be_visible()
    page.keyboard.press("Escape")
    for width, scheme in VIEWS:
        visit.resize(*WIDTHS[width])
        visit.paint(scheme)
        found = visit.probe()
        where = f"{name}, {width}, {scheme}"
        assert not found["faint"], f"{where}: contrast below 4.5: {found['faint']}"
        assert not found["rawTex"], f"{where}: raw TeX: {found['rawTex']}"
        assert not found["errors"], f"{where}: MathJax could not set {found['errors']}"
        assert found["typeset"] == found["formulas"], where
        assert found["overflow"] <= 0, f"{where}: the page scrolls sideways: {found['wide']}"
        assert not found["wide"], f"{where}: {found['wide']}"
        assert not found["scrolling"], f"{where}: formulas scroll in a line that is wide enough: {found['scrolling']}"
        assert not found["traceback"], f"{where}: a traceback is published"
        for picture in found["pictures"]:
            assert picture["alpha"] == 255, f"{where}: {picture['source']} is missing or lets the page shine through"
            assert len(picture["alt"]) >= 15, f"{where}: {picture['source']} says too little: {picture['alt']!r}"
    bars = printed_bars(visit)
    assert not bars, f"{name}: prints scrollbars on {bars}"
    visit.sound()


PAPER = 718  # pixels between the margins of a sheet of A4
BARS = """() => [...document.querySelectorAll("main *:not(mjx-container *)")].filter((element) => {
  if (element.scrollWidth <= element.clientWidth && element.scrollHeight <= element.clientHeight) return false;
  const style = getComputedStyle(element);
  const wide = element.scrollWidth > element.clientWidth && /auto|scroll/.test(style.overflowX);
  const high = element.scrollHeight > element.clientHeight && /auto|scroll/.test(style.overflowY);
  return (wide || high) && style.scrollbarWidth !== "none" && element.checkVisibility();
}).map((element) => `${element.tagName} ${element.className}: ${element.textContent.trim().slice(0, 40)}`)"""


def printed_bars(visit: Visit) -> list[str]:
    """What would be printed with a scrollbar, which no reader of paper can move."""
    visit.resize(PAPER)
    visit.page.emulate_media(media="print")
    found: list[str] = visit.page.evaluate(BARS)
    visit.page.emulate_media(media="screen")
    return found


def test_search_finds(visit: Visit) -> None:
    """The search page, which needs no server of its own, finds a chapter by a word of its title."""
    page = visit.open("search.html?q=remembered")
    page.wait_for_selector("#search-results li a")
    hits = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.getAttribute('href'))")
    assert any("04_kv_cache" in hit for hit in hits), hits
    assert not visit.complaints, visit.complaints


def test_keyboard(visit: Visit) -> None:
    """The first Tab reaches the link past the navigation; a folded reply opens with Enter."""
    page = visit.open(f"{CHAPTERS[0]}.html")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.getAttribute('href')") == "#main-content"
    reply = page.locator("details.reply").first
    reply.locator("summary").focus()
    page.keyboard.press("Enter")
    assert reply.get_attribute("open") is not None


def test_tab_passes_formulas(visit: Visit) -> None:
    """The Tab key goes through a chapter's text from link to link; no formula holds it up."""
    page = visit.open(f"{CHAPTERS[3]}.html")
    page.evaluate("""() => {
      window.stops = [];
      const note = (event) => window.stops.push(event.target.closest(".math") ? "formula" : "other");
      document.addEventListener("focusin", note);
      document.querySelector("article p a:not(.headerlink)").focus();
    }""")
    for _ in range(200):
        page.keyboard.press("Tab")
        if not page.evaluate("() => document.activeElement.closest('article')"):
            break
    stops = page.evaluate("() => window.stops")
    assert len(stops) >= 20, stops
    assert "formula" not in stops, f"{stops.count('formula')} of {len(stops)} stops are formulas"


# ------------------------------------------------------------------ the list of chapters, the contents of a page


FOCUSED = "element => element.contains(document.activeElement)"


def toggle(page: Page, kind: str) -> Locator:
    """The one button for a drawer that a reader sees, found by its name."""
    return page.get_by_role("button", name={"primary": "Chapters", "secondary": "On this page"}[kind], exact=True)


def drawer(page: Page, kind: str) -> Locator:
    return page.locator(f"#pst-{kind}-sidebar-modal")


@pytest.mark.parametrize("way", ["click", "keyboard"])
@pytest.mark.parametrize("kind", ["primary", "secondary"])
def test_drawer(visit: Visit, kind: str, way: str) -> None:
    """At every width below the theme's columns a drawer opens, takes the focus, closes, and gives the focus back."""
    page = visit.open(f"{CHAPTERS[3]}.html", "phone")
    button, dialog = toggle(page, kind), drawer(page, kind)
    for columns in (390, 700, 900) if kind == "primary" else (390, 700, 900, 1100):
        visit.resize(columns)
        assert button.get_attribute("aria-expanded") == "false"
        if way == "click":
            button.click()
        else:
            button.focus()
            page.keyboard.press("Enter")
        expect(dialog, f"{kind}, {columns} px").to_be_visible()
        assert page.get_by_role("dialog").get_attribute("aria-label") in {"Chapters", "On this page"}
        box = dialog.bounding_box()
        assert box, columns
        assert box["x"] >= 0, box
        assert box["x"] + box["width"] <= columns, box
        assert dialog.get_by_role("link").count() >= 5
        assert dialog.evaluate(FOCUSED), "a reader with a keyboard is still behind the drawer"
        if way == "click":
            dialog.get_by_role("button", name="Close").click()
        else:
            page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert button.evaluate(FOCUSED), "the focus did not come back to the button"
    visit.sound()


def test_drawers_are_legible(visit: Visit) -> None:
    page = visit.open(f"{CHAPTERS[3]}.html", "phone")
    for kind in ("primary", "secondary"):
        toggle(page, kind).click()
        for scheme in ("light", "dark"):
            visit.paint(scheme)
            style = drawer(page, kind).evaluate("element => getComputedStyle(element).backgroundColor")
            assert re.fullmatch(r"rgb\(.*\)", style), f"the page shines through the drawer: {style}"
            faint = visit.probe()["faint"]
            assert not faint, f"{kind}, {scheme}: {faint}"
        page.keyboard.press("Escape")
        expect(drawer(page, kind)).to_be_hidden()


def test_chapter_is_reached(visit: Visit) -> None:
    """On a phone: from the list to another chapter, and there from the contents to a section, which is then seen."""
    page = visit.open(f"{DOCUMENTS[0]}.html", "phone")
    toggle(page, "primary").click()
    drawer(page, "primary").get_by_role("link", name="What must be remembered?").click()
    page.wait_for_url(f"**/{CHAPTERS[3]}.html")
    toggle(page, "secondary").focus()
    page.keyboard.press("Enter")
    link = drawer(page, "secondary").get_by_role("link", name="The ledger", exact=True)
    target = link.get_attribute("href")
    assert target
    link.focus()
    page.keyboard.press("Enter")
    expect(drawer(page, "secondary")).to_be_hidden()
    page.wait_for_url(f"**{target}")
    expect(page.locator(target)).to_be_in_viewport()
    page.keyboard.press("Tab")  # goes on from the section, not from the top of the page
    assert page.evaluate("() => document.activeElement.getBoundingClientRect().top") >= 0
    assert page.evaluate("() => !!document.activeElement.closest('article')")
    visit.sound()


@pytest.mark.parametrize("columns", [1100, 1280])
def test_list_folds(visit: Visit, columns: int) -> None:
    """In a wide window the button folds the column of chapters and unfolds it, by mouse and by keyboard."""
    page = visit.open(f"{CHAPTERS[3]}.html")
    visit.resize(columns)
    button, column = toggle(page, "primary"), page.locator("#pst-primary-sidebar")
    article = page.locator("article.bd-article")

    def left() -> float:
        box = article.bounding_box()
        assert box
        return box["x"]

    beside = left()
    expect(column).to_be_visible()
    for press in (lambda: button.click(), lambda: page.keyboard.press("Enter")):
        press()
        expect(column, f"{columns} px").to_be_hidden()
        assert left() < beside - 100, "the text does not get the room"
        assert button.get_attribute("aria-expanded") == "false"
        press()
        expect(column, f"{columns} px").to_be_visible()
        assert left() == beside
        assert button.get_attribute("aria-expanded") == "true"
    expect(page.get_by_role("dialog")).to_have_count(0)
    visit.sound()


# ------------------------------------------------------------------ the files, read


FOREIGN = r"(?:url\(|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)"
FORMULA = re.compile(
    r'class="math notranslate nohighlight"[^>]*>\s*(?:<span class="eqno">.*?</span>)?\s*\\[(\[](.*?)\\[)\]]\s*</', re.S
)


class Links(HTMLParser):
    """Ids, links and fetched resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.ids.update(given[key] for key in ("id", "name") if key in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") not in {"canonical", "next", "prev", "index", "search"}:
            self.fetched.append(given.get("href", ""))


def pages(site: Path) -> dict[Path, Links]:
    return {
        path: Links(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }


@pytest.mark.parametrize("name", CHAPTERS)
def test_download(site: Path, name: str) -> None:
    """Each chapter offers its stand-alone notebook, and the file is a notebook."""
    page = site / f"{name}.html"
    links = Links(page.read_text(encoding="utf-8")).links
    offered = [link for link in links if link.endswith(f"colab/{page.stem}.ipynb") and not urlparse(link).scheme]
    assert offered
    nbformat.validate(nbformat.read(page.parent / unquote(offered[0]), as_version=4))


def test_links_resolve(site: Path) -> None:
    """Every local link of every page leads to a file that exists, and to an id in it."""
    read, dead = pages(site), []
    for path, page in read.items():
        for link in page.links:
            target, fragment = urldefrag(link)
            if urlparse(target).scheme:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.exists():
                dead.append(f"{path.name}: {link}")
            elif fragment and file in read and unquote(fragment) not in read[file].ids:
                dead.append(f"{path.name}: {link} (no such place in the page)")
    assert not dead, dead


def test_nothing_is_fetched(site: Path) -> None:
    """No script, style, font or picture of another host is named anywhere in the pages and styles."""
    named = [
        f"{path.name}: {address}"
        for path, page in pages(site).items()
        for address in page.fetched
        if urlparse(address).netloc
    ]
    for sheet in site.rglob("*.css"):
        named += [f"{sheet.name}: {url}" for url in re.findall(FOREIGN, sheet.read_text("utf-8"))]
    assert not named, named


WORDY = re.compile(r"\\(?:text\w*|math\w+|operatorname\*?|mbox|label|tag|begin|end|color)\s*\{[^{}]*\}|\\[A-Za-z]+")


def words(tex: str) -> list[str]:
    """Words in a formula that no macro declares to be words: a sign that two amounts of money became one."""
    return re.findall(r"[A-Z]?[a-z]{4,}|[A-Z][a-z]{3,}", WORDY.sub(" ", html.unescape(tex)))


def test_amounts_are_not_formulas(site: Path) -> None:
    assert words("2 per hour and") == ["hour"]
    assert not words(r"\frac{\text{bytes per token}}{\mathrm{softmax}(x)} \operatorname{Var}(q) = 2LKDb")
    found = []
    for path in pages(site):
        for tex in FORMULA.findall(path.read_text("utf-8")):
            found += [f"{path.name}: {word} in {tex[:60]}" for word in words(re.sub(r"<[^>]+>", "", tex))]
    assert not found, found


def test_launch_buttons_lead_somewhere(site: Path) -> None:
    """A Colab link names a stand-alone notebook that the published branch will hold; no address is invented."""
    sys.path.insert(0, str(ROOT / "book" / "_ext"))
    try:
        import editions
    finally:
        sys.path.pop(0)
    slug = editions.repository(ROOT)
    for path, page in pages(site).items():
        for link in (link for link in page.links if urlparse(link).netloc.startswith("colab.")):
            assert slug, f"{path.name} links {link}, but nothing says where the repository is"
            prefix = f"{editions.COLAB}/{slug}/blob/gh-pages/"
            assert link.startswith(prefix), link
            assert (site / link.removeprefix(prefix)).exists(), link


@pytest.mark.parametrize(
    ("remote", "slug"),
    [
        ("https://github.com/reader/token-by-token.git", "reader/token-by-token"),
        ("https://github.com/reader/token-by-token/", "reader/token-by-token"),
        ("git@github.com:reader/token-by-token.git", "reader/token-by-token"),
        ("https://example.org/reader/token-by-token", None),
        ("reader/token-by-token", None),
        ("/srv/git/book.git", None),
    ],
)
def test_repository_address(remote: str, slug: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    import editions

    monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert editions.repository(tmp_path) is None
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert editions.repository(tmp_path) == slug
    monkeypatch.setenv("BOOK_REPOSITORY", "another/address")
    assert editions.repository(tmp_path) == "another/address"


# ------------------------------------------------------------------ the palette


def palette() -> dict[str, dict[str, str]]:
    """The colours of each theme, by name, as the style sheet gives them."""
    sheet = (ROOT / "book" / "_static" / "book.css").read_text(encoding="utf-8")
    blocks = dict.fromkeys(("any", "light", "dark"), "")
    for selector, body in re.findall(r"^(html[^{,]*)\{(.*?)^\}", sheet, re.S | re.M):
        theme = re.search(r'data-theme="(\w+)"', selector)
        blocks[theme[1] if theme else "any"] += body
    return {theme: dict(re.findall(r"--([\w-]+):\s*(#[0-9A-Fa-f]{6});", body)) for theme, body in blocks.items()}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, by the definition of WCAG 2."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


HUES = ("llama", "deepseek", "jamba", "baseline", "reader")


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.01)  # the lightest grey that passes on white


def test_palette_is_the_figures_palette() -> None:
    """Pages and figures use one set of hues, and a figure's paper is the page's."""
    sheet = palette()
    for hue in HUES:
        assert sheet["any"][hue] == tbt.plot.colors[hue]
        assert sheet["light"][f"{hue}-text"] == tbt.plot.colors[f"{hue}-dark"]
        assert sheet["dark"][f"{hue}-text"] == tbt.plot.colors[f"{hue}-light"]
    assert sheet["light"]["paper"] == tbt.plot.paper


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_palette_is_legible(theme: str) -> None:
    """Every colour for words reaches 4.5 on every surface that words stand on."""
    colours = palette()[theme]
    surfaces = ["paper", "sheet", "card", *(name for name in colours if name.endswith("-tint"))]
    inks = ["ink", "soft", *(name for name in colours if name.endswith("-text") or name.startswith("code-"))]
    assert len(surfaces) >= 6
    assert len(inks) >= 12
    low = {(i, s): contrast(colours[i], colours[s]) for i in inks for s in surfaces}
    assert not {pair: round(value, 2) for pair, value in low.items() if value < 4.5}


# ------------------------------------------------------------------ a build that must fail


def notebook(*cells: Any) -> str:
    page = nbformat.v4.new_notebook(cells=list(cells))
    page.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return str(nbformat.writes(page))


def small_book(folder: Path, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build a book of two pages and `extra` ones with this repository's settings, extensions and command."""
    (folder / "book").mkdir(parents=True)
    for name in ("_ext", "_static"):
        shutil.copytree(ROOT / "book" / name, folder / "book" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "_config.yml", folder / "_config.yml")
    good = nbformat.v4.new_code_cell(
        "print(6 * 7)", execution_count=1, outputs=[nbformat.v4.new_output("stream", text="42\n")]
    )
    files = {
        "book/index.md": (
            "# Small\n\n:::::{predict}\n:key: predict-01-1\n:answer: choice\n\nWhat is 6 · 7?\n\n"
            "::::{reply} 13\nThat is the sum.\n::::\n:::::\n\n"
            ":::::{predict}\n:key: predict-01-2\n:answer: number\n:unit: ms\n\nHow long?\n\n"
            "::::{reply} 4.5 ms\nIt is.\n::::\n:::::\n"
        ),
        "book/references.bib": "@book{knuth, title={The Art}, author={Knuth, Donald}, publisher={A}, year={1968}}\n",
        "book/good.ipynb": notebook(
            nbformat.v4.new_markdown_cell("# Good\n\n{cite:t}`knuth`\n\n```{bibliography}\n```"), good
        ),
        **extra,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    names = sorted(name.rsplit(".", 1)[0] for name in files if name.endswith((".ipynb", ".md")) and "index" not in name)
    (folder / "_toc.yml").write_text(
        yaml.safe_dump({"format": "jb-book", "root": "book/index", "chapters": [{"file": n} for n in names]})
    )
    command = [sys.executable, str(ROOT / "book" / "_tools" / "build.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_sound_book_is_built(tmp_path: Path) -> None:
    """With this repository's settings and boxes, in a folder with a space."""
    sound = small_book(tmp_path / "a sound book", {})
    assert sound.returncode == 0, sound.stderr
    page = (tmp_path / "a sound book" / "_build" / "html" / "book" / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<details class=\"reply[^>]*>\s*<summary>13</summary>", page)
    boxes = re.findall(r"<div ([^>]*class=\"[^\"]*predict[^>]*)>", page)
    assert len(boxes) == 2
    assert 'data-key="predict-01-1"' in boxes[0]
    assert 'data-kind="choice"' in boxes[0]
    assert "data-unit" not in boxes[0]
    assert 'data-kind="number"' in boxes[1]
    assert 'data-unit="ms"' in boxes[1]
    assert page.count('class="admonition-title"') == 2
    for name in ("data-", ":key:"):
        assert name not in re.sub("<[^>]*>", "", page)


def page_with(options: str) -> str:
    return f"# Page\n\n:::::{{predict}}\n{options}\n\nHow long?\n\n::::{{reply}} 4\nNo.\n::::\n:::::\n"


def notebook_with(**cell: Any) -> str:
    return notebook(nbformat.v4.new_markdown_cell("# A page"), nbformat.v4.new_code_cell("1 / 0", **cell))


ERROR = nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
# Pages that must not be published, and what is said of each.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "keyless.md": (page_with(":answer: choice"), ("needs :key:",)),
    "kindless.md": (page_with(":key: predict-01-1"), ("needs :answer:",)),
    "unitless.md": (page_with(":key: predict-01-1\n:answer: number"), (":unit: belongs to",)),
    "of_a_choice.md": (page_with(":key: predict-01-1\n:answer: choice\n:unit: ms"), (":unit: belongs to",)),
    "undecided.md": (page_with(":key: predict-01-1\n:answer: maybe"), ("maybe",)),
    "failed.ipynb": (notebook_with(execution_count=1, outputs=[ERROR]), ("ZeroDivisionError",)),
    "unrun.ipynb": (notebook_with(), ("cell 2 was never run",)),
    "dead.md": (
        "# Dead\n\n[nowhere](nowhere.md), {py:class}`no.such.Thing`, {cite:t}`nobody`\n",
        ("nowhere", "no.such.Thing", "nobody"),
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One book with all of them: a build takes ten seconds."""
    pages = {f"book/{name}": text for name, (text, _) in REFUSED.items()}
    return small_book(tmp_path_factory.mktemp("refused") / "book", pages)


@pytest.mark.parametrize("name", REFUSED)
def test_build_refuses(name: str, refused: subprocess.CompletedProcess[str]) -> None:
    """By a message about this page that counts as a warning, of which the command above allows none."""
    assert refused.returncode != 0
    about = re.findall(
        rf"^\S*/{re.escape(name)}(?::\d+)?: (?:WARNING|ERROR): .*(?:\n(?!\S+: ).*)*", refused.stderr, re.M
    )
    for complaint in REFUSED[name][1]:
        assert any(complaint in message for message in about), refused.stderr
