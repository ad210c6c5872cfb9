"""The page in a real browser: charts drawn, table sorted, nothing fetched, light and dark.

Needs playwright's Python package and a Chromium: Debian's, or playwright's own.
"""

from __future__ import annotations

import re
import zlib
from unittest.mock import ANY

import pytest

from report_pages import NASTY, image_case
from scodkit.report.rates import Rate

pytestmark = pytest.mark.slow

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SIDES = ("top", "right", "bottom", "left")

# of every canvas: how many pixels are painted, shadow roots included
PAINTED = """place => {
  let painted = 0;
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.tagName === "CANVAS" && element.width && element.height) {
        const data = element.getContext("2d")
          .getImageData(0, 0, element.width, element.height).data;
        for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
      }
      if (element.shadowRoot) walk(element.shadowRoot);
    }
  };
  walk(place);
  return painted;
}"""
# what a finger on a chart may do
TOUCH = """place => {
  const found = [];
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.classList.contains("bk-events"))
        found.push(getComputedStyle(element).touchAction);
      if (element.shadowRoot) walk(element.shadowRoot);
    }
  };
  walk(place);
  return found;
}"""
DRAWN = "() => [...document.querySelectorAll('.chart')].every(c => c.dataset.drawn)"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return image_case().report().save(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser, path):
    """Open the page as a reader would, and note everything that goes wrong."""
    contexts = []

    def open_page(width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.wrong, page.asked = [], []
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on(
            "console",
            lambda said: (
                page.wrong.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function(DRAWN)
        page.wait_for_timeout(200)  # for the frame that is drawn next
        return page

    yield open_page
    for context in contexts:
        context.close()


# how many parts of bokeh's plots have a name, and where they are
PLACES_OF = """name => Bokeh.documents.map(d => d.roots()[0])
  .flatMap(p => p.renderers).filter(r => r.name === name)
  .map(r => [[...r.data_source.data.x], [...r.data_source.data.y]])"""


def column(page, index, table="#methods table"):
    cells = page.locator(f"{table} tbody tr > :nth-child({index})")
    return [text.split()[0] for text in cells.all_inner_texts() if text]


def test_charts_are_drawn_without_a_word_or_a_request(opened, path):
    page = opened()
    assert page.wrong == []
    # its own pictures are in it
    assert [url for url in page.asked if not url.startswith("data:")] == [path.as_uri()]
    charts = page.locator(".chart")
    assert charts.count() == 9
    for i in range(charts.count()):
        assert charts.nth(i).evaluate(PAINTED) > 1000
    assert page.title().startswith("T </script>")


def test_the_table_is_sorted_by_mouse_and_by_keyboard(opened):
    page = opened()
    assert column(page, 1) == ["middle", "best", "worst"]
    head = page.locator("#methods thead th")
    head.nth(1).locator("button").click()
    assert head.nth(1).get_attribute("aria-sort") == "descending"
    assert column(page, 2) == ["0.900", "0.800", "0.100"]
    head.nth(1).locator("button").click()
    assert head.nth(1).get_attribute("aria-sort") == "ascending"
    assert column(page, 2) == ["0.100", "0.800", "0.900"]
    page.keyboard.press("Tab")  # to the next title
    page.keyboard.press("Enter")
    assert head.nth(2).get_attribute("aria-sort") == "descending"
    assert head.nth(1).get_attribute("aria-sort") == "none"
    assert column(page, 1) == ["middle", "best", "worst"]  # blank cells stay last
    page.keyboard.press("Space")
    assert column(page, 1) == ["best", "middle", "worst"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert column(page, 4) == ["10", "9", "2"]  # as numbers, not as words
    head.nth(0).locator("button").click()
    assert column(page, 1) == ["best", "middle", "worst"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(opened, scheme):
    page = opened(360, color_scheme=scheme, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for details in page.locator("details").all():
        details.locator("summary").tap()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.wrong == []
    # a finger on a chart scrolls the page
    assert page.locator("#histogram").evaluate(TOUCH) == ["auto"]


def test_a_mouse_zooms_at_once(opened):
    assert opened().locator("#histogram").evaluate(TOUCH) != ["auto"]


def test_dark_and_light_follow_the_reader(opened):
    page = opened(color_scheme="light")

    def ground():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def bars():
        return page.evaluate(
            """() => {
              const plots = Bokeh.documents.map(d => d.roots()[0]);
              const histogram = plots.find(p => p.renderers.some(r => r.glyph.type == "Quad"));
              const axis = histogram.below[0].major_label_text_color;
              return [...histogram.renderers.map(r => r.glyph.line_color.value
                ?? r.glyph.line_color), axis.value ?? axis];
            }"""
        )

    light = (ground(), bars())
    assert light[0] == "rgb(255, 255, 255)"
    assert light[1] == ["#0072b2", "#d55e00", "#14171c", "#4a525e"]
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)
    assert ground() == "rgb(20, 23, 28)"
    assert bars() == ["#56b4e9", "#e69f00", "#f0f2f5", "#b4bcc8"]
    assert page.wrong == []


def test_charts_move_under_the_keyboard(opened):
    page = opened()
    ranges = """() => {
      const plot = Bokeh.documents.map(d => d.roots()[0])[0];
      return [plot.x_range.start, plot.x_range.end, plot.y_range.start, plot.y_range.end];
    }"""
    before = page.evaluate(ranges)
    page.locator("#histogram").focus()
    page.keyboard.press("+")
    closer = page.evaluate(ranges)
    assert before[0] < closer[0] < closer[1] < before[1]
    assert closer[3] - closer[2] == pytest.approx(0.7 * (before[3] - before[2]))
    page.keyboard.press("ArrowRight")
    assert page.evaluate(ranges)[1] > closer[1]
    page.keyboard.press("0")
    assert page.evaluate(ranges) == pytest.approx(before)
    page.wait_for_timeout(600)
    scrolled = page.evaluate("scrollY")
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(400)  # the page would scroll smoothly
    assert page.evaluate("scrollY") == scrolled


def test_the_pointer_tells_numbers_and_zooms(opened):
    page = opened()
    page.locator("#roc").scroll_into_view_if_needed()
    page.wait_for_timeout(600)
    box = page.locator("#roc").bounding_box()
    tip = page.locator(".tip")
    for step in range(80):  # somewhere down there the curve is met
        page.mouse.move(
            box["x"] + box["width"] * 0.6, box["y"] + box["height"] * (0.05 + 0.01 * step)
        )
        page.wait_for_timeout(30)
        if tip.count():
            break
    said = tip.first.inner_text()
    assert "95 % band" in said
    assert f"set others {NASTY}" in said  # as words
    assert tip.locator("img").count() == 0
    end = "() => Bokeh.documents.map(d => d.roots()[0])[2].x_range.end"
    before = page.evaluate(end)
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 200, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)
    assert page.evaluate(end) < before
    assert page.wrong == []


def test_the_slider_says_what_another_threshold_would_do(opened, case):
    page = opened()
    scores = [one.scores.numpy() for one in case.sets]
    threshold = case.monitor.calibration.threshold(0.05)

    def shown():
        rows = page.locator(".slider tbody tr")
        return [rows.nth(i).locator("td").all_inner_texts() for i in range(rows.count())]

    def counted(at):
        above = [int((own > at).sum()) for own in scores]
        for row, count, own in zip(shown(), above, scores, strict=True):
            low, high = Rate(count, len(own)).ends
            share = f"{100 * count / len(own):.1f}\xa0%"
            ends = f"{100 * low:.1f} to {100 * high:.1f}\xa0%"
            assert row[1:] == [str(count), str(len(own)), share, ends]
        assert page.evaluate(PLACES_OF, "threshold") == [[[at, at], [0, ANY]]]
        ((x, y),) = page.evaluate(PLACES_OF, "operating:0")
        assert (x, y) == ([above[0] / 100], [above[1] / 60])

    counted(threshold)
    slider = page.locator("#threshold")
    assert slider.get_attribute("aria-valuetext").startswith(
        f"{threshold:.3g} nats, for 4.4\xa0% false alarms (3 of 90 held-out inputs score "
        "higher, the nearest possible below 5\xa0%)"
    )
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    steps = page.evaluate("JSON.parse(document.getElementById('data').textContent).slider")
    before = page.locator("#threshold-says").inner_text()
    assert int(slider.input_value()) == steps["start"] - 5
    counted(steps["steps"][steps["start"] - 5])
    page.keyboard.press("End")
    assert [row[1] for row in shown()] == ["0", "0"]
    assert page.locator("#threshold-says").inner_text() != before
    page.locator("#threshold-reset").click()
    counted(threshold)
    assert page.wrong == []


def visible(page, kind, **data):
    chosen = "".join(f'[data-{name}="{value}"]' for name, value in data.items())
    return page.locator(f"#inputs {kind}[data-set]{chosen}:visible").count()


def test_inputs_are_filtered(opened, case):
    page = opened()
    assert (visible(page, "li"), visible(page, "tr")) == (24, 24)
    page.locator("#filter-show").select_option("mistakes")
    assert visible(page, "tr") == visible(page, "tr", wrong=1) == 7
    assert visible(page, "li") == visible(page, "li", wrong=1) > 0
    assert page.locator("#filter-says").inner_text().startswith("7 listed below, ")
    assert page.locator("#inputs h3:visible").count() <= 3
    page.locator("#filter-show").select_option("alarms")
    raised = sum(int(case.monitor.flag(x).sum()) for x in (case.known, case.unknown))
    assert visible(page, "tr") == visible(page, "tr", alarm=1) == raised
    page.locator("#filter-set").select_option("known ones")
    assert visible(page, "tr") == int(case.monitor.flag(case.known).sum())
    page.locator("#filter-show").select_option("all")
    page.locator("#filter-class").select_option("class 1")
    assert visible(page, "tr") == int((case.sets[0].targets == 1).sum())
    page.locator("#filter-reset").click()
    assert (visible(page, "li"), visible(page, "tr")) == (24, 24)
    page.locator("#filter-from").fill("1e9")
    assert visible(page, "tr") == 0
    assert page.wrong == []


def test_a_bar_that_is_pressed_shows_its_inputs(opened, case):
    page = opened()
    page.locator("#histogram").scroll_into_view_if_needed()
    page.wait_for_timeout(600)
    # the middle of the tallest bar of the second set, in pixels of the page
    bar = page.evaluate(
        """() => {
          const plot = Bokeh.documents.map(d => d.roots()[0])[0];
          const bars = plot.renderers.find(r => r.name === "click:1").data_source.data;
          const count = [...bars.count], i = count.indexOf(Math.max(...count));
          const [left, right, top] = [bars.left[i], bars.right[i], bars.share[i]];
          return { left, right, top, count: count[i] };
        }"""
    )
    place = page.evaluate(
        """bar => {
          const plot = [...Bokeh.index].find(v => v.model === Bokeh.documents[0].roots()[0]);
          const x = plot.frame.x_scale.compute(Math.sqrt(bar.left * bar.right));
          const y = plot.frame.y_scale.compute(0.9 * bar.top);
          const box = plot.el.getBoundingClientRect();
          return [box.left + x, box.top + y];
        }""",
        bar,
    )
    page.mouse.click(*place)
    page.wait_for_timeout(700)
    said = page.locator("#filter-says").inner_text()
    assert f"{bar['count']} of others" in said
    scores = case.sets[1].scores
    inside = (scores >= bar["left"]) & (scores <= bar["right"])
    others = visible(page, "tr") - visible(page, "tr", set="known ones")
    assert others == int(inside.sum()) == bar["count"]
    top = "document.getElementById('inputs').getBoundingClientRect().top"
    page.wait_for_function(f"{top} < 300")  # it scrolls smoothly
    assert page.wrong == []


def test_the_charts_of_the_stream_move_together(opened):
    page = opened()
    ends = """() => Bokeh.documents.map(d => d.roots()[0]).filter(p => p.tags.length)
      .map(p => [p.x_range.start, p.x_range.end])"""
    first = page.evaluate(ends)
    assert first == [[0, 161], [0, 161]]
    page.locator("#evidence").focus()
    page.keyboard.press("+")
    moved = page.evaluate(ends)
    assert moved[0] == moved[1] != first[0]


def test_the_phone_stacks_the_checks(opened):
    page = opened(390, is_mobile=True, has_touch=True)
    rows = page.locator(".checks tbody tr")
    assert rows.count() == 7
    first = rows.first
    name, verdict = first.locator("th").bounding_box(), first.locator("td").first.bounding_box()
    assert name["y"] >= verdict["y"] + verdict["height"] - 1
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def drawn_images(pdf):
    """Yield lower and upper ends of all images of a PDF by Chromium, and its pages' heights."""
    objects = dict(re.findall(rb"(\d+) 0 obj\s(.*?)endobj", pdf, re.DOTALL))
    for page in objects.values():
        if re.match(rb"<</Type /Page\b(?!s)", page):
            height = float(page.partition(b"/MediaBox [0 0 ")[2].split()[1].strip(b"]"))
            content = page.partition(b"/Contents ")[2].split()[0]
            for low, high in images_of(objects, content, 1.0, 0.0):
                yield low, high, height


def images_of(objects, content, scale, shift):
    """Follow vertical scale and shift; Chromium turns and shears nothing."""
    head, _, rest = objects[content].partition(b"stream")
    packed = rest.partition(b"\n")[2].rpartition(b"endstream")[0]
    words = (zlib.decompressobj().decompress(packed) if b"/Filter" in head else packed).split()
    before = []
    for i, word in enumerate(words):
        if word == b"q":
            before.append((scale, shift))
        elif word == b"Q":
            scale, shift = before.pop()
        elif word == b"cm":
            own, moved = float(words[i - 3]), float(words[i - 1])
            scale, shift = scale * own, shift + scale * moved
        elif word == b"Do":
            number = words[i - 1].removeprefix(b"/X")
            if b"/Subtype /Image" in objects[number]:
                yield tuple(sorted((shift, shift + scale)))
            else:
                yield from images_of(objects, number, scale, shift)


# elements that are cut by a page's end though they should not be: too high, or inside of one
# that scrolls, which is cut like a picture
UNPRINTABLE = """() => {
  const whole = document.querySelectorAll("figure, tr, .gallery li, .facts > div, .slider");
  return [...whole].filter((element) => {
    const style = getComputedStyle(element);
    const height = element.getBoundingClientRect().height;
    if (style.breakInside !== "avoid" || height > 1050) return true;
    for (let up = element; up; up = up.parentElement)
      if (getComputedStyle(up).overflowY !== "visible") return true;
    return false;
  }).map((element) => element.outerHTML.slice(0, 200));
}"""


def test_a_print_cuts_no_chart_and_no_row(browser, path):
    context = browser.new_context(viewport={"width": 794, "height": 1123})
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    page.emulate_media(media="print")
    styles = page.evaluate(
        """() => ["figure", ".gallery li", "tr"].map((name) => {
          const style = getComputedStyle(document.querySelector(name));
          return style.printColorAdjust;
        })"""
    )
    assert styles == ["exact"] * 3
    assert page.locator("nav").is_hidden()
    for folded in ("details => details.open = false", "details => details.open = true"):
        for details in page.locator("details").all():
            details.evaluate(folded)
        if "true" not in folded:
            assert page.evaluate(UNPRINTABLE) == []
        images = list(drawn_images(page.pdf(format="A4", margin=dict.fromkeys(SIDES, "10mm"))))
        assert len(images) > 9 + 24  # charts and pictures
        assert [(low, high) for low, high, top in images if low < -1 or high > top + 1] == []
    context.close()


def test_a_word_from_outside_that_got_through_could_do_nothing(opened):
    page = opened()
    page.evaluate(
        """() => {
          const own = document.createElement("script");
          own.textContent = "document.title = 'taken'";
          document.body.append(own);
          const picture = document.createElement("img");
          picture.src = "https://example.org/x.png";
          document.body.append(picture);
        }"""
    )
    page.wait_for_timeout(300)
    assert page.title() != "taken"
    assert len(page.wrong) == 2
    assert all("Content Security Policy" in words for words in page.wrong)
