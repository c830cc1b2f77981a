"""Checks of the page of `lantern demo`, each in a process of its own.

    python -m tests.generation.demo_page function|browser MODEL [--shots FOLDER]

`browser` needs chromium, chromedriver and selenium. `--shots` writes screenshots of the page: filling, done, or failed.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from lantern.generation.demo import SideBySide, build_page, launch_options
from lantern.models.folder import load_model

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1000,1180"
)
LOADED = "return performance.getEntriesByType('resource').map(entry => entry.name)"


def check_function(sides: SideBySide) -> None:
    """Call the function of the button as Gradio does."""
    import gradio

    functions = {one.name: one for one in build_page(sides).fns.values()}
    function = functions["fill"]
    offered = functions["offer"].fn("relaxed")
    assert offered.value == offered.choices[0][1] and "tolerance" in [name for _, name in offered.choices]
    assert function.fn is not None and function.concurrency_limit == 1
    outputs = list(function.fn("a red apple", "eagle1", 3.0, 5, []))
    plain, other, numbers, accepted, gallery, past = outputs[-1]
    assert "data:image/webp" in plain and "tokens per step" in other and "tokens per step" in numbers
    assert "<svg" in accepted and "swatch" in accepted and gallery == past and past[0][1].endswith("seed 5")
    assert all(one[3] == "" for one in outputs[:-1])
    again = list(function.fn("a red apple", "eagle1", 3.0, 6, past))[-1][-1]
    assert len(again) == 2 and again[1] == past[0]
    try:
        list(function.fn("a red apple", "eagle1", 1e9, 5, []))
    except gradio.Error as error:
        assert "guidance is" in str(error)
        print("fills")


def check_browser(sides: SideBySide, shots: Path | None) -> None:
    """Use the page in headless Chromium; it loads nothing from other hosts."""
    from selenium import webdriver  # pyright: ignore[reportMissingImports]
    from selenium.webdriver.support.ui import WebDriverWait  # pyright: ignore[reportMissingImports]

    page = build_page(sides)
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver: Any = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    wait = WebDriverWait(driver, 240, poll_frequency=0.02)

    def find(selector: str) -> Any:
        return wait.until(lambda found: found.find_elements("css selector", selector))[0]

    def shoot(name: str) -> None:
        if shots is not None:
            driver.save_screenshot(str(shots / name))

    try:
        _, url, _ = page.launch(prevent_thread_lock=True, **launch_options())
        driver.get(url)
        find("#gallery")
        wait.until(lambda found: "Loading" not in found.find_element("tag name", "body").text)
        slider, most = find("#guidance").rect, find("#guidance .max_value")
        assert most.text == "20" and most.rect["x"] + most.rect["width"] <= slider["x"] + slider["width"]
        find("#generate").click()
        wait.until(lambda found: "tokens" in found.find_element("id", "plain").text)
        time.sleep(1.0 if shots else 0)
        shoot("filling.png")
        assert find("#accepted svg path") and find("#gallery img")
        text = driver.find_element("tag name", "body").text
        assert "tokens per step" in text and "tokens per step" in text and "run of 2 or 3 tokens" in text
        others = [name for name in driver.execute_script(LOADED) if not name.startswith((url, "data:", "blob:"))]
        assert others == [], others
        shoot("done.png")
        print("shown")
    except Exception:
        shoot("failed.png")
        raise
    finally:
        driver.quit()
        page.close(verbose=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["function", "browser"])
    parser.add_argument("model")
    parser.add_argument("--shots", type=Path)
    given = parser.parse_args()
    made = SideBySide(load_model(given.model, device="cpu", engine="eager"))
    if given.kind == "function":
        check_function(made)
    else:
        check_browser(made, given.shots)
    made.close()
