"""The page of `lantern demo` and the site of the documents in a real browser: desktop and phone, light and dark.

Slow, and skipped without selenium (`pip install selenium`), Chromium and its driver (chromium and chromium-driver of
Debian).
"""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lantern.models.folder import Model

HAS_ALL = all(map(shutil.which, ("chromium", "chromedriver"))) and all(map(find_spec, ("selenium", "gradio")))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_ALL, reason="selenium, gradio, chromium or chromedriver is not installed"),
]
DESKTOP, PHONE = (1440, 900), (390, 844)


@pytest.fixture(scope="module")
def address(model: Model) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lantern", "demo", str(model.folder), "--port", str(port), "--engine", "eager"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.terminate()


@pytest.fixture(params=[(DESKTOP, "light"), (PHONE, "light"), (PHONE, "dark")], ids=["desktop", "phone", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    from selenium import webdriver  # pyright: ignore[reportMissingImports]

    (width, height), scheme = request.param
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    found = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < height}
    found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield found
    found.quit()


def fits(browser: Any) -> bool:
    """Return whether neither the page nor an image is wider than the window."""
    return browser.execute_script(
        "return document.documentElement.scrollWidth <= innerWidth"
        " && [...document.images].every((one) => one.getBoundingClientRect().right <= innerWidth)"
    )


def test_a_visitor_sees_an_image_makes_another_and_goes_back_through_its_steps(address: str, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait  # pyright: ignore[reportMissingImports]

    def read(selector: str, name: str) -> Any:
        return browser.execute_script(f"return document.querySelector({selector!r})?.{name}")

    def changed(selector: str, name: str, before: Any = None) -> Any:
        """Return the value of an element once it is there, and another than before."""
        WebDriverWait(browser, 60).until(lambda _: read(selector, name) not in (None, before))
        return read(selector, name)

    def enter(selector: str, text: str) -> None:
        box = browser.find_element("css selector", selector)
        box.clear()
        box.send_keys(text)

    browser.get(address)
    opened = changed("#plain a[download]", "href")  # before the first click
    assert re.fullmatch(r"(The same|Another) image.* in this run\.", changed("#numbers strong", "textContent"))
    assert read("#method input", "value").startswith("same image: ")
    before = changed("#accepted img", "src")
    enter("#subject textarea, #subject input", "a green pear")
    browser.execute_script("document.querySelector('#generate').click()")
    changed("#plain a[download]", "href", opened)
    shown = changed("#accepted img", "src", before)
    assert changed("#steps input[type=number]", "value") == read("#steps input[type=number]", "max")
    enter("#steps input[type=number]", "1\n")
    changed("#accepted img", "src", shown)
    assert fits(browser)
    colour = read("body", "computedStyleMap().get('background-color').toString()")
    is_dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 384) == is_dark
    assert not browser.get_log("browser")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    root = Path(__file__).parents[1]
    subprocess.run(["mkdocs", "build", "-q", "--no-directory-urls", "--site-dir", folder], cwd=root, check=True)
    return folder


def test_pages_of_the_site_fit(site: Path, browser: Any) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        browser.get(page.as_uri())
        assert fits(browser), page
        shown = browser.find_elements("css selector", "article img")
        assert all(one.get_property("naturalWidth") for one in shown), page
