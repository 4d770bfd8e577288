"""The console over a real cluster, in a real browser: live, escaped, readable on any screen."""

from pathlib import Path

import numpy as np
import pytest

from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.heterps.browser import CHROMIUM, Browser
from tests.heterps.consoles import console
from tests.jobs import write_ratings

pytest.importorskip("fastapi", reason="the console's extra is not installed")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
NAME = "<script>alert(1)</script>"
# Faults that anybody would meet: of structure, of width, of contrast by WCAG 2.2 AA.
AUDIT = """(() => {
  const faults = [], all = (s) => [...document.querySelectorAll(s)];
  const one = (s) => { if (all(s).length !== 1) faults.push(`${s}: ${all(s).length}`); };
  ["h1", "main", "body>header", "footer", "head>title"].forEach(one);
  if (!document.documentElement.lang) faults.push("no language");
  for (const e of all("nav,section")) if (!e.getAttribute("aria-label") &&
    !document.getElementById(e.getAttribute("aria-labelledby"))) faults.push("no name: " + e.id);
  for (const e of all("table")) if (!e.caption) faults.push("no caption");
  for (const e of all("input:not([type=hidden]),select")) if (!e.labels.length &&
    !e.getAttribute("aria-label")) faults.push("no label: " + e.name);
  for (const e of all("svg[role=img]")) if (!e.querySelector("title,desc")?.textContent)
    faults.push("no text for a chart");
  for (const e of all("img:not([alt])")) faults.push("no alt: " + e.src);
  const ids = all("main [id]:not(marker)").map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push("twice: " + id);
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) faults.push("wider than the window");
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
    return [255, 255, 255, 255]; };
  for (const e of all("body *:not(script):not(style):not(title):not(desc)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (!own || !box.width || e.closest(".hidden,[hidden],.block-text")) continue;
    const ink = light(rgba(e.closest("svg") ? style.fill : style.color));
    const paper = light(ground(e));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) faults.push(`${ratio.toFixed(2)}: ${e.textContent.trim().slice(0, 30)}`);
  }
  return faults;
})()"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), types={"cpu": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def pages(cluster, tmp_path_factory):
    with console(cluster.address, tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def submit(client, tmp_path_factory):
    """Submit the job with overrides; its id."""
    folder: Path = tmp_path_factory.mktemp("job")
    draw = np.random.default_rng(0)
    user, item = draw.integers(0, 500, 4000), draw.integers(0, 50, 4000)
    label = (user + item) % 2
    file = write_ratings(folder, zip(user, item, label, strict=True), 100, pause_s=0.03)

    def queue(*overrides):
        job = load_job(file, [f"name={NAME}", f"output={folder}/out", *overrides])
        return client.submit(job)

    return queue


@pytest.fixture(scope="module")
def done(client, submit):
    """A job that has trained."""
    job_id = submit()
    job = client.wait(job_id, timeout=400)
    assert job.state == "succeeded", job.reason
    return job


@pytest.fixture(scope="module")
def failed(client, submit, done):
    job_id = submit("model.args.fails_at=5")
    job = client.wait(job_id, timeout=400)
    assert job.state == "failed"
    return job


def test_a_failure_is_on_one_page_with_the_end_of_the_log(pages, failed):
    text = pages.ask(f"/jobs/{failed.job_id}").text
    assert "Why it failed" in text
    assert "the &lt;b&gt;head&lt;/b&gt; has had enough" in text
    assert "the <b>head</b>" not in text
    assert ">failed<" in pages.ask("/").text


def test_names_are_shown_as_they_were_written(pages, done):
    for path in ("/", f"/jobs/{done.job_id}", f"/jobs/{done.job_id}/what-if", "/nodes"):
        answer = pages.ask(path)
        assert answer.status == 200
        assert NAME not in answer.text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert pages.ask("/jobs/nobody").status == 404


def test_a_page_needs_no_script(pages, done):
    page = pages.ask(f"/jobs/{done.job_id}").text
    for shown in ("Stage utilisation", "How it came here", "Predicted and measured", "test"):
        assert shown in page
    assert "profiling" in page
    assert "training 100 steps" in pages.ask(f"/jobs/{done.job_id}/logs").text
    decision = pages.ask(f"/jobs/{done.job_id}/decision").text
    for shown in ("The plan: layers over resource types", "Cost against throughput", "Why"):
        assert shown in decision


def test_its_curves_become_tensorboard_events(cluster, done, run, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    code, out, _ = run("tensorboard", done.job_id, "--dir", str(tmp_path), "--scheduler",
                       cluster.address)  # fmt: skip
    assert code == 0
    assert str(tmp_path / done.job_id) in out
    events = accumulator.EventAccumulator(str(tmp_path / done.job_id)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/samples_per_s", "utilisation/stage_0", "test/auc"} <= tags
    losses = events.Scalars("train/loss")
    assert losses[-1].step == 100
    assert [one.step for one in losses] == sorted(one.step for one in losses)
    assert losses[-1].value == pytest.approx(done.loss)
    assert done.started_at <= losses[0].wall_time <= losses[-1].wall_time <= done.ended_at
    assert all(0 <= one.value <= 1 for one in events.Scalars("utilisation/stage_0"))
    assert events.Scalars("test/auc")[0].value == pytest.approx(done.metrics["test_auc"])


def test_followed_logs_end_with_the_job(pages, done):
    answer = pages.ask(f"/jobs/{done.job_id}/logs/stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "training 100 steps" in answer.text
    assert answer.text.endswith('event: end\ndata: {"problem": ""}\n\n')


def test_a_dearer_type_costs_more(pages, done):
    path = f"/jobs/{done.job_id}/what-if"
    answer = pages.ask(f"{path}?ask=1&cpu.price=0.08").text
    assert "The cost rises from" in answer
    assert "(+100.0%)" in answer
    assert "Old plan" in answer
    impossible = pages.ask(f"{path}?ask=1&min-throughput=1e12").text
    assert "No plan meets the demands any more" in impossible
    wrong = pages.ask(f"{path}?ask=1&finish-by=soon").text
    assert 'role="alert"' in wrong
    assert "finish-by" in wrong
    linked = pages.ask(f"{path}?ask=1&cpu.price=0.08", sec_fetch_site="cross-site").text
    assert "The cost rises from" not in linked


@needs_browser
def test_a_running_job_moves_and_is_cancelled_in_the_browser(pages, browser, submit, failed):
    job_id = submit("train.max_steps=20000")
    browser.window(1000)
    browser.console.clear()
    browser.open(pages.url)
    browser.evaluate("window.stayed = true")
    row = f"document.getElementById('to-{job_id}').closest('tr')"
    browser.wait_for(f"document.getElementById('to-{job_id}') && {row}.querySelector('progress')")
    before = browser.wait_for(f"{row}.querySelector('progress').value")
    browser.wait_for(f"{row}.querySelector('progress').value > {before}")
    browser.follow(f"document.getElementById('to-{job_id}').click()")
    assert browser.evaluate("document.querySelector('h1').textContent") == NAME
    browser.evaluate("document.getElementById('tab-logs').focus()")
    for part in ("curves", "stages", "shards", "measured"):
        browser.wait_for(f"document.getElementById('{part}')")
    assert browser.evaluate("document.activeElement.id") == "tab-logs", "focus stays"
    assert "keys/s" in browser.wait_for(
        "document.querySelectorAll('#shards svg').length && document.body.innerText"
    )
    browser.follow("document.getElementById('tab-logs').click()")
    browser.wait_for("document.getElementById('logs-state').textContent === 'Followed live.'")
    browser.wait_for("document.getElementById('logs').innerText.includes('training 20000 steps')")
    browser.follow("document.getElementById('cancel').click()")
    browser.follow("document.querySelector('button.danger').click()")
    browser.wait_for("document.querySelector('.state.cancelled')")
    assert browser.console == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_every_page_is_readable_on_any_screen(pages, browser, done, failed, width, dark):
    job = f"jobs/{done.job_id}"
    browser.window(width, dark=dark)
    browser.console.clear()
    asked = f"{job}/what-if?ask=1&cpu.price=0.08"
    paths = ["", job, f"{job}/decision", f"{job}/logs", asked, "nodes"]
    for path in [*paths, f"jobs/{failed.job_id}"]:
        browser.open(f"{pages.url}{path}")
        assert browser.evaluate(AUDIT) == [], path
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ("rgb(15," in ground) == dark
    assert browser.console == []
