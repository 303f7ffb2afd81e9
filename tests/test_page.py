"""The page of a run, in a real browser: curves, samples, what a model wrote, and a run that goes on."""

import base64
import io
import itertools
import json
import queue
import shutil
import threading
import urllib.error
import urllib.request

import pytest
import run_page
import show
from PIL import Image

api = pytest.importorskip("playwright.sync_api", reason="of requirements/dev.txt")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic"]
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{SCRIPT}}"
    "<!--<script>\u2028 \u202eright to left\u202c \u0007"
)


@pytest.fixture(scope="module")
def chromium():
    """The browser of the system, or the one that `playwright install chromium` brought."""
    with api.sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        try:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        except api.Error as error:
            pytest.skip(f"no chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens a page; at the end nothing may have failed in it, or asked for anything but itself."""
    contexts, complaints = [], []

    def opened(address):
        context = chromium.new_context()
        contexts.append(context)
        page = context.new_page()

        def look_at(request):
            is_itself = request.url.split("#")[0] in (address.split("#")[0], f"{address}state")
            if not is_itself and not request.url.startswith("data:"):
                complaints.append(request.url)

        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda told: complaints.extend([told.text] * (told.type == "error")))
        page.on("request", look_at)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def sample(step, group, number, **fields):
    tokens = fields.pop("tokens", ["a", " b", "<eos>"])
    return {
        "step": step, "group": group, "row": group % 7, "prompt": f"question {group % 7}", "columns": {"answer": "b"},
        "completion": "".join(tokens), "reward": number / 4, "rewards": {"right": number / 4, "brief": 1.0},
        "advantage": number - 1.5, "finish_reason": "stop", "info": {},
        "weight_versions": [[step - 1, 0, len(tokens)]], "tokens": tokens, "logprobs": [-0.1] * len(tokens), **fields,
    }  # fmt: skip


def write(folder, name, rows, mode="w"):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open(mode, encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def make_run(folder, samples=None, held_out=(), num_steps=6):
    metrics = [
        {"step": step, "reward": step / 10, "entropy": None if step == 2 else 1 / step, "completions/mean_length": 3.0}
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    if samples is None:
        places = itertools.product(range(1, num_steps + 1), range(2), range(4))
        samples = [sample(step, 2 * step + group, number) for step, group, number in places]
    write(folder, "metrics", metrics)
    write(folder, "completions", samples)
    write(folder, "held_out", held_out)
    (folder / "config.json").write_text(json.dumps({"model_id": "tiny", "seed": 3}))
    return folder


def page_of(*folders):
    path = folders[0] / "run.html"
    show.main([*map(str, folders), "--html"])
    return path.as_uri()


@pytest.fixture
def shown(tmp_path, visit):
    """Opens the page of a run of such samples."""
    return lambda *samples, **more: visit(page_of(make_run(tmp_path / "run", *samples, **more)))


def figures(page):
    return page.locator("article .figures").all_inner_texts()


def rewards(page):
    """Of the completions that are shown, from above."""
    return [text.split()[1] for text in figures(page)]


def step_of(page):
    return page.get_by_label("step", exact=True).input_value()


def test_a_step_sorted_filtered_and_linked(shown, visit):
    page = shown()
    assert page.locator("figure").count() == 4  # reward, length, entropy, and one to choose
    assert step_of(page) == "6"  # the last
    assert page.locator("h2", has_text="group 12").count() == 1

    page.get_by_label("sort by").select_option("reward")
    assert rewards(page) == ["0.75", "0.75", "0.5", "0.5", "0.25", "0.25", "0", "0"]
    page.get_by_role("button", name="highest first").click()
    assert rewards(page)[0] == "0"
    page.get_by_label("sort by").select_option("advantage")
    assert "advantage +1.5" in figures(page)[0]
    page.keyboard.press("[")
    assert "step 5" in figures(page)[0]
    page.get_by_placeholder("with this text").fill("question 4")  # groups 10 and 11: rows 3 and 4
    assert len(figures(page)) == 4
    assert all("group 11" in text for text in figures(page))

    page.locator("article .figures").first.click()
    assert page.locator(".tokens .token").all_inner_texts() == ["a", " b", "<eos>"]
    link = page.get_by_role("link", name="link to it").get_attribute("href")
    again = visit(page.url.split("#")[0] + link)
    chosen = "article.chosen .figures"
    assert again.locator(chosen).inner_text() == page.locator(chosen).inner_text()

    page.get_by_role("button", name="this prompt over the steps").click()
    steps = page.locator("#list h2").all_inner_texts()
    assert steps == ["step 2", "step 5"]  # groups 4 and 11 have row 4

    curve = page.locator("figure svg").first
    box = curve.bounding_box()
    curve.click(position={"x": box["width"] * (46 + 306 * 2 / 5) / 360, "y": 60})
    assert step_of(page) == "3"
    curve.hover(position={"x": box["width"] * 46 / 360, "y": 60})
    assert "reward 0.1 at step 1" in page.locator("figcaption").first.inner_text()


def test_a_filter_by_reward(shown, visit):
    """Of any function, between two bounds; what it did not judge is not among them."""
    brief = [0.5, None, None, None]
    rows = [sample(1, 0, n, rewards={"right": n / 4, "brief": brief[n]}) for n in range(4)]
    held_out = [{**sample(s, n, n), "set": ""} for s in (0, 1) for n in range(3)]
    page = shown([*rows, sample(1, 0, 4, reward=None, rewards={})], held_out)
    menu = page.get_by_label("filter by reward")
    menu.select_option("no reward")
    assert rewards(page) == ["none"]
    menu.select_option("brief")
    assert [text.split()[3] for text in figures(page)] == ["0"]
    menu.select_option("right")
    page.get_by_label("least reward").fill("0.25")
    page.get_by_label("most reward").fill("0.5")
    assert rewards(page) == ["0.25", "0.5"]

    page.keyboard.press("Escape")
    page.keyboard.press("h")  # the filter stays, and is seen
    assert page.get_by_label("least reward").input_value() == "0.25"
    assert page.locator(".problem").count() == 2
    assert visit(page.url).locator(".problem").count() == 2


def test_addresses_stay_out_of_a_page(tmp_path):
    folder, small = make_run(tmp_path / "run"), tmp_path / "small"
    (folder / "config.json").write_text(json.dumps({"seed": 3, "vllm_urls": ["http://secret:1"]}))
    assert b"secret" not in run_page.page([folder])
    show.main([str(folder), "--keep", str(small)])
    assert "secret" not in (small / "config.json").read_text()
    (folder / "run_id").write_text("1")
    with pytest.raises(SystemExit, match="is a run of its own"):
        show.main([str(small), "--keep", str(folder)])


def test_curves_of_a_long_run():
    """Means of neighbours, at the last step of each; held-out figures stand where they were taken."""
    rows = [{"step": step, "reward": float(step)} for step in range(1, 5000)]
    rows[2999]["eval/reward"] = 0.25
    found = run_page.columns(rows)
    assert found["step"] == [*range(3, 5000, 3), 4999]
    assert found["reward"] == [*range(2, 4999, 3), 4999]
    assert found["eval/reward"] == [0.25 if step == 3000 else None for step in found["step"]]


def test_what_a_model_wrote_is_text(shown):
    """Nothing of it runs, ends the data, or turns a line around; half a pair of surrogates is shown."""
    rows = [
        sample(1, 0, 0, tokens=[HOSTILE, "\ud83d", "end"], prompt=[{"role": HOSTILE, "content": HOSTILE}],
               columns={HOSTILE: HOSTILE}, info={"messages": [{"role": "user", "content": HOSTILE}]}),
    ]  # fmt: skip
    page = shown(rows, [{**rows[0], "set": HOSTILE}])
    page.locator("article .figures").first.click()
    assert page.evaluate("window.hacked") is None
    text = page.locator("#list").inner_text()
    assert text.count("</script><script>window.hacked = 1</script><img src=x") == 8
    assert "\u202e" not in text
    for character in ("⟨U+202E⟩", "⟨U+0007⟩", "⟨U+D83D⟩"):
        assert character in text
    page.get_by_role("button", name="held-out").click()
    assert page.evaluate("window.hacked") is None


def test_odd_samples_do_not_break_the_page(shown):
    """Those of older runs, without tokens; messages that are none; a log-prob that JSON has no number for."""
    old = sample(1, 0, 0)
    del old["tokens"], old["logprobs"]
    messages = [None, {"role": "tool"}, {"content": [None]}], "cut"
    odd = [sample(1, 0, 1 + n, info={"messages": each}) for n, each in enumerate(messages)]
    unlikely = sample(1, 1, 0, logprobs=[None, -0.1, -0.1])
    page = shown([old, *odd, sample(1, 0, 3, prompt=[None]), unlikely])
    for number in range(5):
        page.keyboard.press("j")
        assert page.locator("article.chosen").count() == 1, number
    assert "very-unlikely" in page.locator(".token").first.get_attribute("class")
    page.keyboard.press("k")
    page.keyboard.press("k")
    assert "cut" in page.locator("article.chosen table").inner_text()


def test_a_link_stays_when_a_run_goes_on(tmp_path, visit):
    """Also where a page then has other steps."""
    folder = make_run(tmp_path / "run")
    page = visit(page_of(folder))
    page.get_by_label("step", exact=True).select_option("6")
    page.locator("article .figures").nth(1).click()
    address, text = page.url, page.locator("article.chosen").inner_text()
    lines = (folder / "completions.jsonl").read_text().splitlines()[8:]
    make_run(folder, [*map(json.loads, lines), sample(9, 30, 0)])
    again = visit(page_of(folder) + "#" + address.split("#")[1])
    assert again.locator("article.chosen").inner_text() == text


def test_tokens_say_what_they_are(shown):
    """Readable without colours: what an environment wrote, another version, unlikely tokens, the cut."""
    row = sample(
        3, 1, 0, tokens=["think", " so", "[result]", " yes"], logprobs=[-0.1, -3.0, 0.0, -5.0],
        weight_versions=[[1, 0, 2], [2, 3, 4]], finish_reason="length",
        earlier=[{"tokens": ["first"], "logprobs": [-0.2], "weight_versions": [[0, 0, 1]], "prompt": "before"}],
    )  # fmt: skip
    page = shown([row])
    page.locator("article .figures").first.click()
    tokens = page.locator(".tokens").last.locator(".token").all()
    assert [(token.inner_text(), token.get_attribute("class")) for token in tokens] == [
        ("think", "token"),
        (" so", "token unlikely"),
        ("[result]", "token from-environment"),
        (" yes", "token very-unlikely new-version"),
    ]
    titles = [token.get_attribute("title") for token in tokens]
    assert titles[1] == "1: log-prob -3 (p 0.0498), policy version 1"
    assert titles[2] == "2: from the environment: it does not train"
    assert page.get_by_text("segment 1 of 2").count() == 1
    assert page.get_by_text("it was cut: length").count() == 1


def test_held_out_problems_that_flipped_come_first(shown, visit):
    """Between the first evaluation and the last, or any two, which the address has."""
    rows = []
    for step, values in ((0, [0, 1, 0, 1]), (3, [0, 0, 0, 0]), (6, [0, 1, 1, 0.5])):
        for row, reward in enumerate(values):
            rows.append(sample(step, row, 0, row=row, reward=reward, set=["aime", "math"][row % 2]))
    page = shown(held_out=rows)
    page.keyboard.press("h")
    wanted = [
        "4 problems: 1 better, 1 worse",
        "at step 0: 4 completions, mean reward 0.5 (0 × 2, 1 × 2), 1 different",
        "at step 6: 4 completions, mean reward 0.625",
    ]
    for told, text in zip(page.locator("#list > p").all_inner_texts(), wanted, strict=True):
        assert told.startswith(text)
    heads = page.locator(".problem > .row").all_inner_texts()
    for head, change in zip(heads, ["▲ +1", "▼ -0.5", *["unchanged"] * 2], strict=True):
        assert change in head

    page.get_by_label("before").select_option("3")
    for each in (page, visit(page.url)):
        told = each.locator("#list > p").first.inner_text()
        assert told.startswith("4 problems: 3 better, 0 worse")
    page.get_by_label("data set").select_option("aime")
    assert page.locator(".problem").count() == 2
    page.keyboard.press("s")  # this view has no sets, and hides nothing
    assert page.locator("article").count() == 8


def test_runs_over_each_other(tmp_path, visit):
    """Each with its curves and steps; settings that differ come first."""
    folders = [make_run(tmp_path / "one"), make_run(tmp_path / "two", num_steps=9)]
    for folder, rate in zip(folders, (0.1, 0.2), strict=True):
        settings = {"beta": 0.0, "learning_rate": rate, "output_dir": str(folder), "stop": None}
        (folder / "config.json").write_text(json.dumps(settings))
    page = visit(page_of(*folders))
    curves = page.locator("figure").first.locator("path.curve")
    assert curves.count() == 2
    page.locator("#head input").first.uncheck()
    assert curves.count() == 1
    page.get_by_label("run", exact=True).select_option("1")
    assert step_of(page) == "9"

    assert page.locator("#settings summary").inner_text() == "learning_rate 0.1, 0.2"
    page.locator("#settings summary").click()
    rows = [row.split("\t") for row in page.locator("#settings tr").all_inner_texts()]
    names = ["", *map(str, folders)]
    values = [["learning_rate", "0.1", "0.2"], ["beta", "0", "0"], ["stop", "null", "null"]]
    assert rows == [names, *values]

    page = visit(page_of(folders[0]))
    assert page.locator("#settings summary").inner_text() == "learning_rate 0.1"  # no default


def test_images_stand_in_the_page(shown, tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(picture, "JPEG")
    (tmp_path / "run" / "images").mkdir(parents=True)
    (tmp_path / "run" / "images" / "seen.jpg").write_bytes(picture.getvalue())
    page = shown([sample(1, 0, 0, images=["seen.jpg", "lost.jpg"])])
    assert page.locator("#list img.small").count() == 1  # beside the group's prompt
    page.locator("article .figures").first.click()
    address = page.locator("article img").get_attribute("src")
    assert base64.b64decode(address.partition(",")[2]) == picture.getvalue()
    assert page.locator("article img").evaluate("image => image.naturalWidth") == 8
    assert page.get_by_text("an image that this page does not have").count() == 1
    assert page.locator("#head .note").inner_text().endswith(": 1 images are left out.")


def test_what_is_too_large(tmp_path):
    """Of many rows steps at even distances stay; of large steps the first groups of two."""
    write(tmp_path, "completions", [sample(s, s, n) for s in range(1, 201) for n in range(64)])
    lines = run_page.read_lines(tmp_path / "completions.jsonl", run_page.MAX_BYTES)
    assert 8_000 <= len(lines.rows) <= 10_000
    assert (lines.rows[0]["step"], lines.rows[-1]["step"]) == (1, 200)
    assert len(lines.rows) + lines.rows_left_out == 12_800
    write(tmp_path, "completions", [sample(s, g, 0) for s in (1, 2, 3) for g in range(100)])
    lines = run_page.read_lines(tmp_path / "completions.jsonl", 10_000)
    assert 5_000 < sum(len(json.dumps(row)) + 1 for row in lines.rows) <= 10_000
    each = len(lines.rows) // 2
    kept = [(row["step"], row["group"]) for row in lines.rows]
    assert kept == [(s, g) for s in (1, 3) for g in range(each)]
    assert (lines.steps_left_out, lines.rows_left_out) == (1, 300 - 2 * each)


def test_a_small_copy_of_a_run(tmp_path, monkeypatch):
    """Some steps with their images."""
    monkeypatch.setattr(run_page, "KEPT_BYTES", 4 * 3_000)
    rows = [sample(s, s, 0, images=[f"{s}.jpg"]) for s in range(1, 21)]
    folder, small = make_run(tmp_path / "run", rows, num_steps=20), tmp_path / "small"
    (folder / "images").mkdir()
    for step in range(1, 21):
        (folder / "images" / f"{step}.jpg").write_bytes(b"a picture")
    show.main([str(folder), "--keep", str(small)])
    kept = [json.loads(line) for line in (small / "completions.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in kept]
    assert (steps[0], steps[-1]) == (1, 20)
    assert 5 <= len(steps) <= 3_000 // len(json.dumps(rows[0]))
    assert kept == [row for row in rows if row["step"] in steps]
    assert {path.stem for path in (small / "images").iterdir()} == set(map(str, steps))
    missing = 20 - len(steps)
    told = f"{missing} completions are left out to keep this small: {missing} steps have none here"
    assert told.encode() in run_page.page([small])


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "completions.jsonl").write_text('{"step": 2, "group"\n')
    with pytest.raises(SystemExit, match=r"completions.jsonl: a line is damaged: b'.\"step\": 2"):
        run_page.read_lines(tmp_path / "completions.jsonl", run_page.MAX_BYTES)


def test_a_page_that_is_served(tmp_path, monkeypatch, visit):
    """It follows its run, for this user alone: by a word in its address, and by no other host name."""
    folder = make_run(tmp_path / "run")
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(run_page, "print", lambda text, **_: told.put(text), raising=False)
    threading.Thread(target=run_page.serve, args=([folder], 0), daemon=True).start()
    address = told.get(timeout=60).split()[0]
    page = visit(address)
    assert step_of(page) == "6"
    write(folder, "metrics", [{"step": 7, "reward": 0.9, "new": 1.0}], "a")
    write(folder, "completions", [sample(7, 20, n) for n in range(4)], "a")
    page.locator("h2", has_text="group 20").wait_for(timeout=20_000)
    assert step_of(page) == "7"
    assert page.evaluate("runs[0].metrics.new.length") == 7

    make_run(folder, num_steps=2)  # it begins anew
    page.locator("h2", has_text="group 4").wait_for(timeout=20_000)
    assert step_of(page) == "2"

    # As a page of another site would ask.
    root = address.rsplit("/", 2)[0]
    for url, host in ((f"{root}/", None), (f"{root}/wrong/", None), (address, "evil.example:80")):
        request = urllib.request.Request(url, headers={"Host": host} if host else {})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=10)
    assert b"GRPO runs" in urllib.request.urlopen(address, timeout=10).read()
