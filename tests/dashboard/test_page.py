"""The page in a real Chromium: open, hover, filter, switch, compare, watch a run write, and a very large run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, Playwright, Route, expect, sync_playwright

from dovetail.observability.run_folder import RunFolder
from tests.dashboard.browser import (
    Server,
    drawn,
    go,
    open_browser,
    open_profile,
    poll,
    seconds_to_first_view,
    serve,
    show,
    until,
)
from tests.dashboard.synthetic import (
    answer_row,
    line,
    metrics_row,
    timeline_row,
    write_agent_run,
    write_async_run,
    write_config,
    write_run,
)

pytestmark = pytest.mark.e2e

expect.set_options(timeout=30_000)
NASTY = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script> & "quotes" é 日本'


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def profile(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with open_profile(playwright, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    one = write_run(home / "one", steps=40, config={"seed": 1})
    two = write_run(home / "two<b>", steps=60, config={"seed": 2})
    rows = [answer_row(12, row) for row in range(32)]
    (one / "rollouts" / "step_12.jsonl").write_text("".join(line(row) for row in rows))
    nasty = line(answer_row(7, 1, response=NASTY, num_tokens=4))
    with (one / "rollouts" / "step_7.jsonl").open("a") as file:
        file.write(nasty)
    plan = {"memory": {"device": "GPU", "device_bytes": 4 * 2**30, "verdict": "fits", "phases": []}}
    plan["memory"]["phases"] = [{"name": "update actor", "items": {"weights": 2**30, "optimizer": 2**30}}]
    (one / "plan.json").write_text(json.dumps(plan))
    return [one, two]


@pytest.fixture(scope="module")
def async_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("async")
    runs = write_async_run(home / "async"), write_run(home / "sync", steps=8), write_agent_run(home / "agent")
    with serve(*runs) as started:
        yield started


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    with serve(*folders) as started:
        yield started


@pytest.fixture
def page(profile: BrowserContext) -> Iterator[Page]:
    opened = profile.new_page()
    opened.set_default_timeout(30_000)
    yield opened
    problems = list(getattr(opened, "problems", []))  # before it is closed, which breaks off what it is asking for
    opened.close()
    assert problems == []


# ---- overview ----


def test_the_first_view_shows_numbers_charts_and_values_under_the_pointer(page: Page, server: Server) -> None:
    show(page, server)
    expect(page.locator("#status")).to_contain_text("step 40 of 40")
    expect(page.locator(".cards .number").first).to_contain_text("reward")
    drawn(page, "reward")
    box = page.locator('.plot[data-chart="reward"] .nsewdrag').bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = page.locator('.plot[data-chart="reward"] .hoverlayer')
    expect(hover).to_contain_text("critic/score/mean")
    for chart in ("accuracy", "length", "entropy", "kl", "grad_norm", "clip", "mismatch"):
        drawn(page, chart)
    events = page.evaluate("""() => document.querySelector('.plot[data-chart="reward"]').data
        .filter((trace) => trace.yaxis === "y2").map((trace) => trace.name)""")
    assert events == ["validation", "checkpoint", "skipped step", "resume"]


def test_a_number_that_is_another_one_than_at_the_first_step_says_so(page: Page, tmp_path: Path) -> None:
    """A validation loss moves by less than half a percent, and that is the news."""
    folder = RunFolder(tmp_path)
    folder.start()
    for step, loss in ((1, 6.032), (2, 6.016)):
        folder.log_metrics(step, {"train/loss": loss, "val/loss": 2.5})
    with serve(tmp_path) as started:
        show(page, started)
        numbers = page.locator(".cards .number")
        expect(numbers.filter(has_text="▼")).to_contain_text("from 6.032 at step 1")
        expect(numbers.filter(has_text="validation")).to_contain_text("as at step 1")


def test_smoothing_log_scale_zoom_and_extra_metrics(page: Page, server: Server) -> None:
    show(page, server)
    drawn(page, "reward")
    traces = "() => document.querySelector('.plot[data-chart=\"reward\"]').data.length"
    before = page.evaluate(traces)
    page.locator("input[type=range]").fill("0.8")
    until(page, f"() => ({traces})() === {before + 1}")
    page.keyboard.press("l")
    until(page, "() => document.querySelector('.plot[data-chart=\"reward\"]').layout.yaxis.type === 'log'")
    page.get_by_label("Add a metric").fill("actor/lr")
    page.get_by_label("Add a metric").press("Enter")
    drawn(page, "actor/lr")
    drawn(page, "reward")
    page.evaluate(
        "() => Plotly.relayout(document.querySelector('.plot[data-chart=\"reward\"]'), "
        "{'xaxis.range[0]': 10, 'xaxis.range[1]': 20})"
    )
    until(page, "() => Math.min(...document.querySelector('.plot[data-chart=\"reward\"]').data[0].x) === 10")
    page.get_by_role("button", name="Reset zoom").click()
    until(page, "() => Math.min(...document.querySelector('.plot[data-chart=\"reward\"]').data[0].x) === 1")
    page.reload()
    drawn(page, "actor/lr")
    drawn(page, "reward")
    assert page.evaluate("() => document.querySelector('.plot[data-chart=\"reward\"]').layout.yaxis.type") == "log"


def test_runs_are_switched_and_laid_over_each_other(page: Page, server: Server) -> None:
    show(page, server)
    drawn(page, "reward")
    page.locator("#overlay-runs input:not([disabled])").check()
    until(
        page,
        """() => { const plot = document.querySelector('.plot[data-chart="reward"]');
        return plot?.data?.some((trace) => trace.name.startsWith("two&lt;b")); }""",
    )
    expect(page.locator("#overlay-runs")).to_contain_text("two<b>")
    page.locator("#run").select_option("two<b>")
    expect(page.locator("#status")).to_contain_text("step 60 of 60")
    page.keyboard.press("r")
    expect(page.locator("#status")).to_contain_text("step 40 of 40")


def test_a_click_on_a_point_opens_the_answers_of_its_step(page: Page, server: Server) -> None:
    show(page, server)
    drawn(page, "reward")
    box = page.locator('.plot[data-chart="reward"] .nsewdrag').bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 30, box["y"] + 30)
    expect(page.locator('.plot[data-chart="reward"] .hoverlayer')).to_contain_text("critic/score/mean")
    page.mouse.click(box["x"] + 30, box["y"] + 30)
    page.wait_for_selector(".view.rollouts[data-ready]")
    assert 1 <= int(page.get_by_role("spinbutton", name="Step").input_value()) <= 10


# ---- time ----


def test_time_has_a_sentence_bars_a_timeline_and_memory(page: Page, server: Server) -> None:
    show(page, server, "#view=time&run=one")
    expect(page.locator(".sentence")).to_contain_text("of a step (4.5 s) is generation, then actor update")
    for chart in ("Seconds per step, by phase", "One step across driver and workers", "Tokens per second and device"):
        drawn(page, chart)
    rows = "() => [...new Set(document.querySelector('[data-chart^=\"One step\"]').data.flatMap((t) => t.y))].sort()"
    assert page.evaluate(rows) == ["driver", "worker 0", "worker 1"]
    drawn(page, "Memory in each phase (GiB): planned parts, and measured")
    measured = "() => document.querySelector('[data-chart^=\"Memory\"]').data.find((t) => t.name === 'measured').x"
    assert page.evaluate(measured) == [2.5]
    page.locator(".view").click(position={"x": 5, "y": 5})
    page.keyboard.press(",")
    expect(page.get_by_label("Step of the timeline")).to_have_value("39")


# ---- asynchronous runs ----


def test_an_asynchronous_run_shows_staleness_its_buffer_and_who_waits(page: Page, async_server: Server) -> None:
    show(page, async_server, "#view=async&run=async")
    for chart in ("Who works, who waits", "Trained tokens by staleness, whole run"):
        drawn(page, chart)
    names = """() => document.querySelector('[data-chart^="Who works"]').data.map((trace) => trace.name)"""
    assert {"generation", "engine: no group to generate", "trainer: no finished group"} <= set(page.evaluate(names))
    starts = """() => document.querySelector('[data-chart^="Who works"]').layout.annotations.map((one) => one.text)"""
    assert page.evaluate(starts) == ["step 6", "step 7", "step 8"]
    shares = """() => document.querySelector('[data-chart$="whole run"]').data[0].y"""
    assert page.evaluate(shares) == pytest.approx([0.5, 0.3, 0.2])
    for chart in ("Effective sample size of token ratios", "Groups: finished and waiting, in flight"):
        drawn(page, chart)
    expect(page.locator('[data-chart="Seconds to bring weights to engines"]')).to_have_count(0)


def test_only_an_asynchronous_run_has_the_view_and_versions_of_tokens(page: Page, async_server: Server) -> None:
    show(page, async_server, "#view=rollouts&run=async&step=8")
    expect(page.locator("#tabs")).to_contain_text("Async")
    page.locator("#colour").select_option("token_versions")
    tokens = page.locator(".answer").first.locator(".token")
    expect(tokens).to_have_count(6)
    assert tokens.first.get_attribute("style") != tokens.last.get_attribute("style")
    tokens.first.hover()
    expect(page.locator("#tip")).to_contain_text("weights of step 5, 2 updates behind")
    show(page, async_server, "#view=rollouts&run=sync&step=8")
    expect(page.locator("#tabs")).not_to_contain_text("Async")
    expect(page.locator("#colour option")).to_have_text(["plain text", "advantage", "log-prob diff", "entropy"])


# ---- trajectories ----


def test_a_trajectory_shows_its_turns_and_calls_and_is_filtered(page: Page, async_server: Server) -> None:
    show(page, async_server, "#view=rollouts&run=agent&step=8")
    first = page.locator(".answer").first
    expect(first.locator(".said .text")).to_have_text(["What is 2 + 3?", "Let me see.", "It is 5."])
    expect(first.locator(".event.tool")).to_contain_text('calculator({"expression":"2+3"})')
    expect(first.locator(".event.tool")).to_contain_text("500 ms")
    expect(first).to_contain_text("finished")
    page.locator("#tool").select_option("search")
    expect(page.locator(".answer")).to_have_count(4)
    expect(page.locator(".event.failed .badge").first).to_have_text("timeout")
    page.locator("#tool").select_option("")
    page.locator("#outcome").select_option("infra")
    expect(page.locator(".event.error").first).to_contain_text("no server (3 attempts)")
    page.locator("#colour").select_option("token_mask")
    tokens = page.locator(".answer").first.locator(".token")
    expect(tokens).to_have_count(6)
    tokens.nth(2).hover()
    expect(page.locator("#tip")).to_contain_text("not trained")
    show(page, async_server, "#view=rollouts&run=sync&step=8")
    expect(page.locator("#outcome")).to_have_count(0)


def test_time_and_overview_of_an_agents_run(page: Page, async_server: Server) -> None:
    show(page, async_server, "#view=time&run=agent")
    drawn(page, "Where a trajectory's time goes (mean of a step)")
    show(page, async_server, "#view=overview&run=agent")
    for chart in ("outcomes", "turns", "tool_calls"):
        drawn(page, chart)


# ---- rollouts ----


def test_answers_are_filtered_ordered_and_searched(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    expect(page.locator(".summary")).to_contain_text("4 of 4 prompts · 32 responses in step 12")
    page.locator("[data-filter=no_signal]").click()
    expect(page.locator(".group")).to_have_count(1)
    expect(page.locator(".group .badge.quiet")).to_have_text("no signal")
    page.locator("[data-filter=wrong]").click()
    expect(page.locator(".answer.wrong")).to_have_count(29)
    expect(page.locator(".answer:not(.wrong)")).to_have_count(0)
    page.locator("[data-filter=truncated]").click()
    expect(page.locator(".answer .badge.cut")).to_have_count(6)
    page.locator("[data-filter=all]").click()
    page.locator("#order").select_option("longest")
    expect(page.locator(".answer").first).to_contain_text("36 tokens")
    page.get_by_label("Search responses and prompts").fill("in row 17 is")
    expect(page.locator(".answer")).to_have_count(1)
    page.locator("#scope").select_option("run")
    expect(page.locator(".summary")).to_contain_text("40 responses found in all steps")
    page.get_by_role("button", name="step 33", exact=True).click()
    expect(page.locator(".summary")).to_contain_text("32 responses in step 33")


def test_a_colouring_that_the_run_has_not_is_plain_text(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&colour=mistyped")
    expect(page.locator("#colour")).to_have_value("")
    expect(page.locator(".answer").first).to_be_visible()


def test_tokens_are_coloured_and_say_their_numbers(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    for colouring in ("token_advantages", "token_logprob_gaps", "token_entropies"):
        page.locator("#colour").select_option(colouring)
        expect(page.locator(".answer .token")).to_have_count(32 * 6)
    last = page.locator(".answer").first.locator(".token").last
    expect(last).to_have_attribute("style", re.compile(r"rgba\(147, 51, 234, 0\.72"))
    last.hover()
    for words in ("token 6, id 5", "advantage 2", "log-prob diff 0.05", "entropy 1"):
        expect(page.locator("#tip")).to_contain_text(words)
    assert page.locator(".answer").first.locator(".tokens").inner_text() == "The sum of step 12 in row 0 is 0."


def test_what_a_model_wrote_is_text_and_never_html(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=7&words=onerror")
    expect(page.locator(".answer .text")).to_have_text(NASTY)
    page.locator("#colour").select_option("token_entropies")
    expect(page.locator(".answer .token")).to_have_count(4)
    assert page.locator(".answer .tokens").inner_text() == NASTY
    assert page.locator(".answer img, .answer script").count() == 0
    assert page.title() != "owned"


def test_two_steps_side_by_side_for_one_prompt(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    page.get_by_role("button", name="other steps").first.click()
    expect(page.locator(".compare .chip")).to_have_text(["step 32", "step 22", "step 2"])
    page.locator(".compare .chip", has_text="step 22").click()
    expect(page.locator(".side h3")).to_have_text(["step 12", "step 22"])
    expect(page.locator(".side").last.locator(".answer")).to_have_count(8)
    show(page, server, page.url.split("/")[-1])  # the dialog is in the address
    expect(page.locator(".compare .chip")).to_have_text(["step 32", "step 22", "step 2"])
    page.keyboard.press("Escape")
    expect(page.locator(".compare")).to_have_count(0)
    expect(page).not_to_have_url(re.compile("compare="))
    page.locator("#kind").select_option("validation")
    expect(page.locator(".summary")).to_contain_text("responses in step 40")  # those of training are gone
    page.get_by_role("button", name="other steps").first.click()
    expect(page.locator(".side h3")).to_have_text(["step 10", "step 40"])


def test_the_step_a_reader_picks_stays_while_the_page_still_loads_its_own_choice(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    held = hold(page, r"/group\?.*step=2&")
    page.get_by_role("button", name="other steps").first.click()
    expect(page.locator(".compare .chip")).to_have_text(["step 32", "step 22", "step 2"])
    page.locator(".compare .chip", has_text="step 22").click()
    expect(page.locator(".side h3")).to_have_text(["step 12", "step 22"])
    release(page, held)
    expect(page.locator(".side h3")).to_have_text(["step 12", "step 22"])


def hold(page: Page, part: str) -> list[Route]:
    """Requests whose address has such a part wait until `release`."""
    held: list[Route] = []
    page.route(re.compile(part), lambda route: held.append(route))
    return held


def release(page: Page, held: list[Route]) -> None:
    """Let them through, and wait until the page has done what it does with the replies."""
    poll(page, lambda: held, "a request that is held")
    for route in held:
        route.continue_()
        until(page, f"() => window.read.includes({json.dumps(route.request.url)})")


def test_the_page_counts_the_runs_that_it_does_not_list(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "run_000", steps=3)
    for number in range(1, 203):
        write_config(tmp_path / f"run_{number:03}", {})
    with serve(tmp_path) as started:
        show(page, started, "#view=overview&run=run_000")
        expect(page.locator("#not-listed")).to_contain_text("3 more runs are not listed: this page lists 200.")


def test_a_view_that_was_left_while_it_loaded_gets_neither_keys_nor_news(page: Page, server: Server) -> None:
    show(page, server, "#view=health&run=one")
    held = hold(page, r"/api/time\?")
    page.keyboard.press("2")
    page.wait_for_selector(".view.time")
    page.keyboard.press("3")
    page.wait_for_selector(".view.rollouts[data-ready]")
    at = page.locator(".step-input").input_value()
    release(page, held)
    page.keyboard.press(",")
    expect(page.locator(".step-input")).not_to_have_value(at)


# In the page: what Playwright intercepts passes three processes, and an abort was once lost on the way.
_LATE_39_NO_38 = """() => {
  const { fetch } = window;
  const released = new Promise((resolve) => { window.release = resolve; });
  window.fetch = async (url, ...rest) => {
    if (url.endsWith("step=38")) throw new TypeError("Failed to fetch");
    if (url.endsWith("step=39")) await released;
    return fetch(url, ...rest);
  };
}"""


def test_the_timeline_is_that_of_the_step_that_was_chosen_last(page: Page, server: Server) -> None:
    show(page, server, "#view=time&run=one&step=40")
    drawn(page, "One step across driver and workers")
    # No reply comes for the last step, so what an earlier one would draw would stay.
    page.evaluate(_LATE_39_NO_38)
    page.keyboard.press(",")
    page.keyboard.press(",")
    note = page.locator(".card", has=page.locator("[data-chart^='One step']")).locator(".note")
    expect(note).to_contain_text("does not answer")
    page.evaluate("() => window.release()")
    until(page, "() => window.read.some((url) => url.endsWith('step=39'))")
    expect(note).to_contain_text("does not answer")


def test_more_responses_skip_none_when_asked_for_twice(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    page.route(lambda url: "/api/groups?" in url and "first=0" in url, with_more)
    page.locator("#order").select_option("longest")
    more = page.get_by_role("button", name="More")
    expect(more).to_be_visible()
    held = hold(page, "first=")
    more.dblclick()
    release(page, held)
    # A second request would have been made before the reply to the first was read.
    assert [route.request.url.split("first=")[1].split("&")[0] for route in held] == ["8"]


def with_more(route: Route) -> None:
    """A page of groups that says there are many more."""
    reply = route.fetch()
    route.fulfill(response=reply, json={**reply.json(), "num_groups": 100})


def test_answers_on_the_page_keep_their_kind_while_others_are_on_their_way(page: Page, server: Server) -> None:
    show(page, server, "#view=rollouts&run=one&step=12")
    page.get_by_role("button", name="other steps").first.wait_for()
    page.route(lambda url: "/steps?" in url and "validation" in url, lambda route: None)  # never answered
    page.locator("#kind").select_option("validation")
    page.get_by_role("button", name="other steps").first.click()
    expect(page.locator(".compare .chip")).to_have_text(["step 32", "step 22", "step 2"])


# ---- settings, health, keys, small screens ----


def test_settings_of_two_runs_differ_where_they_differ(page: Page, server: Server) -> None:
    show(page, server, "#view=config&run=one")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.locator("#other").select_option("two<b>")
    expect(page.locator("tbody th code")).to_have_text(["trainer.seed", "trainer.total_training_steps"])
    expect(page.locator("td.differs")).to_have_text(["2", "60"])


def test_keys_reach_every_view_and_the_theme(page: Page, server: Server) -> None:
    show(page, server)
    for key, view in (("5", "health"), ("4", "config"), ("3", "rollouts"), ("2", "time"), ("1", "overview")):
        page.keyboard.press(key)
        page.wait_for_selector(f".view.{view}[data-ready]")
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    until(page, f"() => getComputedStyle(document.body).backgroundColor !== {json.dumps(before)}")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()


def test_a_small_screen_needs_no_sideways_scrolling(page: Page, async_server: Server) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    small = show(page, async_server, "#view=overview&run=async")
    assert small.evaluate("() => document.documentElement.dataset.theme") == "dark"
    views = [("async", view) for view in ("overview", "time", "rollouts", "config", "health", "async")]
    for run, view in [*views, ("agent", "rollouts")]:
        go(small, async_server, f"#view={view}&run={run}")
        if small.locator(".plot").count():
            small.locator(".plot[data-drawn]").first.wait_for()
        assert small.evaluate("() => document.documentElement.scrollWidth") <= 360, (run, view)


def test_no_button_of_the_header_has_a_line_of_its_own(page: Page, async_server: Server) -> None:
    page.set_viewport_size({"width": 1280, "height": 740})
    show(page, async_server, "#view=overview&run=async")
    for width in range(740, 1281, 20):
        page.set_viewport_size({"width": width, "height": 740})
        tab, button = page.locator("#tabs").bounding_box(), page.locator("#help-open").bounding_box()
        assert tab is not None
        assert button is not None
        assert tab["y"] <= button["y"] < tab["y"] + tab["height"], width


# ---- live, broken, large ----


def test_the_page_follows_a_run_that_writes(page: Page, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "live")
    folder.start()
    folder.write_config({"trainer": {"seed": 3}})
    folder.write_now(step=1, total_steps=9, phase="gen")
    with serve(tmp_path / "live") as server:
        show(page, server)
        expect(page.locator("#message")).to_contain_text("No step is finished yet")
        expect(page.locator("#status")).to_contain_text("running")
        expect(page.locator("#status")).to_contain_text("generation for")
        for step in (1, 2):
            folder.log_metrics(step, {k: v for k, v in metrics_row(step, 9).items() if k != "step"})
            folder.write_answers(step, [answer_row(step, row) for row in range(16)])
            folder.log_timeline(step, [(w, p, s, e, m) for w, p, s, e, m in timeline_row(step)["spans"]])
            expect(page.locator("#status")).to_contain_text(f"step {step} of 9")
        expect(page.locator("#message")).to_be_hidden()
        drawn(page, "reward")
        until(page, "() => document.querySelector('.plot[data-chart=\"reward\"]').data[0].x.length === 2")
        page.keyboard.press("3")
        expect(page.locator(".summary")).to_contain_text("in step 2")
        folder.write_answers(3, [answer_row(3, row) for row in range(16)])
        expect(page.locator(".summary")).to_contain_text("in step 3")
        folder.write_now(step=3, total_steps=9, phase="gen", waits="the trainer waits for draw 12")
        page.keyboard.press("2")
        expect(page.locator(".sentence")).to_contain_text("Right now: generation, step 3: the trainer waits for")
        folder.write_now(step=3, total_steps=9, phase=None, failed="It failed: no progress for 300 s.")
        expect(page.locator("#status")).to_contain_text("stopped")
        expect(page.locator("#message")).to_contain_text("no progress for 300 s")


def test_a_broken_place_in_the_address_is_a_message(page: Page, server: Server) -> None:
    show(page, server, "#view=nothing&run=nobody&step=zzz")
    expect(page.locator("#status")).to_contain_text("step 40 of 40")
    go(page, server, "#view=rollouts&run=one&step=zzz")
    expect(page.locator(".summary")).to_contain_text("in step 40")


@pytest.mark.slow
def test_ten_thousand_steps_and_a_million_answers_stay_quick(playwright: Playwright, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "large", steps=10_000, rollouts_per_step=100)
    views = []
    # A fresh server knows nothing yet; the best of three, because other programs may be at work here.
    while not views or (min(views) > 2.0 and len(views) < 3):
        with serve(folder) as server, open_browser(playwright) as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(120_000)
            views.append(seconds_to_first_view(page, server))
            drawn(page, "reward")
            page.goto(f"{server.address}/#view=rollouts&run=large&step=5000")
            page.wait_for_selector(".group")
            page.get_by_label("Search responses and prompts").fill("step 5000 in row 77")
            expect(page.locator(".answer")).to_have_count(1)
            for view in ("time", "health", "config"):
                page.goto(f"{server.address}/#view={view}&run=large")
                page.wait_for_selector(f".view.{view}[data-ready]")
            memory = server.resident_mib()
    assert min(views) < 2.0, f"seconds to the first view: {views}"
    assert memory < 300, f"{memory:.0f} MiB"
