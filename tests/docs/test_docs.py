"""The documents say what is true: their links lead somewhere, what is generated is current, and the site builds."""

import functools
import http.server
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import refresh
from ckptguard_daemon.metrics import DaemonFacts, exposition
from servers.fixtures import skip_or_fail
from servers.processes import NotInstalledError
from servers.web_servers import served
from support.browsing import chromium, missing
from support.markdown import DOCS, ROOT, anchors, called, links, pages, prose, wide_lines
from support.prose import problems

from ckptguard.layouts.table import LAYOUTS
from ckptguard.values.run_summary import RunSummary
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions

ALL = pages()
CODE = ("ckptguard", "daemon", "tests", "benchmarks")


@pytest.mark.parametrize("page", ALL, ids=called)
def test_the_page_is_plain(page):
    """No sentence is long, no line is wide, no word is one that only we know."""
    text = page.read_text(encoding="utf-8")
    assert problems(prose(text)) + wide_lines(text) == []


@pytest.mark.parametrize("page", [*ALL, ROOT / "CHANGELOG.md"], ids=called)
def test_links_lead_somewhere(page):
    """Every link to a file of the repository finds it, and the heading that it names."""
    lost = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            lost.append(link)
        # The site has only what lies below docs/.
        if page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
            lost.append(link)
    assert lost == []


def test_every_page_is_in_the_site():
    """mkdocs.yml names each page once, and no other."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in ALL if page.is_relative_to(DOCS))


@pytest.mark.parametrize(("path", "text"), refresh.generated().items(), ids=lambda x: getattr(x, "stem", ""))
def test_generated_pages_are_current(path, text):
    """The pages of the commands say what the code says. `python dev.py docs --refresh` writes them."""
    assert path.read_text(encoding="utf-8") == text


def test_the_settings_are_complete():
    """Every setting is in a table of its page, with its default."""
    text = (DOCS / "reference/settings.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", text, re.MULTILINE))
    told = {name: tomllib.loads(f"x = {text}")["x"] if text else None for name, text in rows.items()}
    assert told == {f.name: plain(f.default) for f in msgspec.structs.fields(Settings)}


def test_the_layouts_are_complete():
    """Every layout is in the table of its page."""
    text = (DOCS / "reference/formats.md").read_text(encoding="utf-8").partition("## Layouts")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == set(LAYOUTS)


def test_the_metrics_are_complete():
    """Every metric is in the table of its page, and no other is."""
    made = exposition([RunSummary(url="/r", name="r")], DaemonFacts(loop_at=1.0), 2.0).decode()
    table = (DOCS / "guides/metrics.md").read_text(encoding="utf-8").partition("## All metrics")[2]
    named = "".join(re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", named)) == set(re.findall(r"^# TYPE ckptguard_(\w+)", made, re.MULTILINE))


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", DOCS / "explain/architecture.md"], ids=called)
def test_the_files_that_a_developer_is_sent_to_exist(page):
    """In the source, in the tests, or below the package that the sentence is about."""
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")))
    there = [f"/{path.relative_to(ROOT)}" for top in CODE for path in (ROOT / top).rglob("*.py")]
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)] == []


def plain(value):
    """A default as TOML would say it."""
    if isinstance(value, StorageOptions):
        return value.revealed() or None
    return list(value) if isinstance(value, tuple) else value


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site, in a folder."""
    if not os.environ.get("CI"):
        pytest.importorskip("zensical", reason="the extra docs")
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    dev = runpy.run_path(str(ROOT / "dev.py"))
    dev["search_from_disk"](folder / "site")
    return folder / "site"


def test_the_site_asks_no_other_machine(site):
    """It builds without a warning, each page of ours is in it, and all that they load is beside them."""
    built = [page.read_text(encoding="utf-8") for page in site.glob("**/*.html")]
    assert len(built) > len(list(DOCS.glob("**/*.md")))
    loaded = r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//[^>]*"
    assert [m[0] for page in built for m in re.finditer(loaded, page) if 'rel="canonical"' not in m[0]] == []


@pytest.mark.parametrize("how", ["from disk", "over HTTP"])
def test_its_search_finds_a_page(site, how):
    """In a browser, on a page in a folder, with no other machine asked."""
    if (wanted := missing()) is not None:
        skip_or_fail(NotInstalledError(wanted))
    handler = functools.partial(QuietFiles, directory=str(site))
    with served(handler) as origin, chromium() as browser:
        start = origin if how == "over HTTP" else site.as_uri()
        page, asked = browser.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{start}/guides/going-back.html")
        page.locator("button.md-search__button").first.click()
        page.get_by_placeholder("Search").fill("quarantine")
        page.get_by_role("option", name=re.compile("quarantine", re.IGNORECASE)).first.wait_for()
        assert [url for url in asked if not url.startswith((start, "data:", "blob:"))] == []
