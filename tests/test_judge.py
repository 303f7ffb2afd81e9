"""The judge of recipes/judge.py, against a server that refuses, delays and counts."""

import asyncio
import importlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from test_rewards import called

from recipes import judge

pytest.importorskip("openai")


class Endpoint(ThreadingHTTPServer):
    """Answers by `reply(question)`; the first request of each question is refused with 429."""

    daemon_threads = True

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.refuses_first = False
        self.questions: list[str] = []
        self.begun_s: list[float] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server: Any = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = request["messages"]
        question = message["content"]
        with server.lock:
            is_new = question not in server.questions
            server.questions.append(question)
            server.begun_s.append(time.monotonic())
            server.running += 1
            server.most = max(server.most, server.running)
        time.sleep(0.05)
        with server.lock:
            server.running -= 1
        if server.refuses_first and is_new:
            self.answer(429, {"error": {"message": "slow down"}})
            return
        message = {"role": "assistant", "content": server.reply(question)}
        self.answer(200, {"choices": [{"message": message}]})

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Retry-After-Ms", "10")  # read where a request is refused
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """An endpoint, and a pool of workers that ask it."""
    server = Endpoint(lambda question: "7")
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    monkeypatch.setenv("JUDGE_REPLIES", str(tmp_path / "judge" / "replies.sqlite"))
    yield server
    server.shutdown()


def judged(function, texts, **columns):
    """What a worker process returns, as a run calls it."""
    return called(function, 60, prompts=["post"] * len(texts), completions=texts, **columns)


def test_grades(endpoint):
    """Each text once, several at a time; what is no grade gives none; a second call asks nothing."""
    grades = {"good": "<think>8 or 9?</think> 9", "bad": "0", "wild": "11", "silent": "no"}

    both = threading.Barrier(2)

    def grade(question):
        both.wait(20)
        (text,) = (text for text in grades if f"\n{text}\n" in question)
        return grades[text]

    endpoint.reply = grade
    assert judged(judge.graded, list(grades)) == [0.9, 0.0, None, None]
    assert len(endpoint.questions) == 4
    assert judged(judge.graded, list(grades)) == [0.9, 0.0, None, None]  # another process
    assert len(endpoint.questions) == 4 + 2  # no grade may be one the next time


GRADES = {
    "7": 0.7, " 10. ": 1.0, "8/10": 0.8, "3 / 10.": 0.3, "<think>1 or 2</think>\n4": 0.4, "": None,
    "2 out of 10": None, "I give 3 of 10.": None, "7.5": None, "-5": None, "11": None,
}  # fmt: skip
LETTERS = {"A": "A", "**B**.": "B", "A or B": None, "": None}


def test_what_a_grade_or_a_letter_is():
    assert {reply: judge.grade_in(reply) for reply in GRADES} == GRADES
    assert {reply: judge.letter_in(reply) for reply in LETTERS} == LETTERS


def test_equal_completions_are_asked_once(endpoint, monkeypatch):
    """And again, where they are refused; another judge is another question."""
    endpoint.refuses_first = True
    assert judged(judge.graded, ["same"] * 8) == [0.7] * 8
    assert len(endpoint.questions) == 2
    monkeypatch.setenv("JUDGE_MODEL", "another")
    assert judged(judge.graded, ["same"]) == [0.7]
    assert len(endpoint.questions) == 3


def test_a_place_does_not_win(endpoint):
    """A judge that always says A prefers nobody; one that likes a text does, wherever it stands."""
    endpoint.reply = lambda question: "A"
    assert judged(judge.preferred, ["mine"], completion=["theirs"]) == [0.5]

    def likes(question):
        return "B" if question.index("better") < question.index("plain") else "A"

    endpoint.reply = likes
    assert judged(judge.preferred, ["better"], completion=["plain"]) == [0.0]
    assert judged(judge.preferred, ["plain ", "x"], completion=["better", "plain"])[0] == 1.0


def test_limits(endpoint, monkeypatch):
    """Requests begin at the pace of a worker, and no more than its places are open."""
    importlib.reload(judge)  # with the endpoint's variables
    monkeypatch.setattr(judge, "AT_ONCE", 3)
    monkeypatch.setattr(judge, "PER_SECOND", 15.0)
    texts = [f"text {number}" for number in range(12)]
    judge.client()  # which takes long to make
    started_s = time.monotonic()
    assert asyncio.run(judge.graded(["post"] * 12, texts)) == [0.7] * 12
    assert endpoint.most <= 3
    # A request is sent after its turn, so two may arrive closer than their turns; the last cannot come early.
    assert endpoint.begun_s[-1] - started_s >= 11 / 15 - 0.01
