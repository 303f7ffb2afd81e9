"""Draw docs/house.svg: the files as rooms of a house, and the way of a Group through them.

    python scripts/picture.py [-o docs/house.svg]

The picture has its own background, so that it reads the same on a light and on a dark page.
"""

import argparse
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 900, 658
INK, PALE, PATH = "#1f2937", "#5b6472", "#c2410c"  # text, small text, the way of a Group
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
BLUE, ORANGE, GREEN, PURPLE, PINK, GREY = (
    "#e6f0fb",
    "#fdf0db",
    "#e6f4ea",
    "#efe9fa",
    "#fce8f0",
    "#eceff3",
)
ROW = [
    (46, 92, ORANGE),
    (140, 60, BLUE),
    (202, 40, BLUE),
    (244, 82, BLUE),
]  # of tokens: x, width, colour
STREAM = ("Groups, sampled", "ahead within", "max_staleness;", "of a lost server:", "sampled anew")
SERVER = ("vLLM, in processes", "of its own, on this", "or other machines")
PREFIX = (
    "A row holds each prompt once, and all of its",
    "completions, which do not see each other:",
)
NAMES = ["prompt", "first", "2nd", "third"]


def rect(
    x: int, y: int, width: int, height: int, fill: str, line: str = "#9aa5b4", radius: int = 6
) -> str:
    """A room."""
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
    return f'{box} fill="{fill}" stroke="{line}"/>'


def text(x: int, y: int, words: str, size: float = 11, css: str = "", fill: str = PALE) -> str:
    """One line; `css` are classes: b(old), m(onospaced), c(entred)."""
    names = f' class="{css}"' if css else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{names}>{escape(words, quote=False)}</text>'


def room(x: int, y: int, width: int, height: int, fill: str, name: str, *lines: str) -> str:
    """A file with what it is for."""
    parts = [rect(x, y, width, height, fill), text(x + 9, y + 17, name, 12, "m b", INK)]
    parts += [text(x + 9, y + 32 + 14 * number, line) for number, line in enumerate(lines)]
    return "\n".join(parts)


def floor(x: int, y: int, width: int, height: int, name: str) -> str:
    """A folder: rooms with a wall around them."""
    return rect(x, y, width, height, "#ffffff") + "\n" + text(x + 9, y + 16, name, 12, "m b", INK)


def arrow(*points: tuple[int, int], css: str = "way") -> str:
    """A line with a head, along points."""
    way = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{way}" class="{css}" marker-end="url(#head)"/>'


def step(x: int, y: int, number: int, *lines: str) -> str:
    """The number of a step in a circle, and what happens there."""
    parts = [f'<circle cx="{x}" cy="{y}" r="9" fill="{PATH}"/>']
    parts.append(text(x, y + 4, str(number), 11, "b c", "#ffffff"))
    parts += [
        text(x + 14, y + 4 + 14 * place, line, 11.5, "", INK)
        for place, line in enumerate(lines)
        if line
    ]
    return "\n".join(parts)


def draw() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="{SANS}" role="img" aria-label="The files, and the way of a Group through them">',
        f"<style>.m{{font-family:{MONO}}}.b{{font-weight:600}}.c{{text-anchor:middle}}"
        f".way{{fill:none;stroke:{PATH};stroke-width:2}}.use{{fill:none;stroke:{PATH};stroke-dasharray:4 3}}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"'
        f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{PATH}"/></marker></defs>',
        rect(1, 1, WIDTH - 2, HEIGHT - 2, "#ffffff", "#d5dae1", 10),
        # the house, and what stands outside
        rect(16, 62, 694, 580, "#f7f8fa", "#3b4656", 10),
        text(532, 54, "the trainer: one process a rank"),
        text(736, 68, "any number of servers"),
        rect(748, 88, 134, 470, PURPLE, "#b8a6dd"),
        rect(742, 83, 134, 470, PURPLE, "#b8a6dd"),
        room(736, 78, 134, 470, PURPLE, "vllm_server.py", *SERVER),
        rect(79, 14, 122, 30, GREY),
        text(140, 33, "dataset row", 12, "c b", INK),
        # rollouts/
        floor(32, 78, 556, 196, "rollouts/"),
        room(46, 106, 140, 62, BLUE, "data.py", "template, images,", "tokens: made once"),
        room(46, 194, 140, 66, BLUE, "replay.py", "saved Groups, in", "place of servers"),
        room(228, 106, 128, 154, BLUE, "stream.py", *STREAM),
        room(388, 212, 88, 48, BLUE, "scoring.py", "rewards"),
        room(488, 212, 88, 48, BLUE, "workers.py", "time-outs"),
        # train.py
        floor(32, 312, 556, 114, "train.py"),
        *(rect(46 + 138 * place, 338, 116, 74, ORANGE) for place in range(4)),
        step(60, 360, 6, "advantages", "in each Group"),
        step(198, 360, 7, "rows, dealt", "to the ranks"),
        step(336, 360, 8, "loss and", "backward of", "each row"),
        step(474, 360, 9, "one division,", "then clip", "and AdamW"),
        # prefix_attention.py, training/
        room(32, 446, 308, 122, PINK, "prefix_attention.py", *PREFIX),
        *(rect(x, 506, width, 26, fill, radius=3) for x, width, fill in ROW),
        *(
            text(x + width // 2, 523, name, 11, "c", INK)
            for (x, width, _), name in zip(ROW, NAMES, strict=True)
        ),
        text(41, 554, "log-probs as if each had its own prompt"),
        floor(356, 446, 232, 122, "training/"),
        room(368, 470, 78, 44, GREEN, "vision.py", "images"),
        room(456, 470, 120, 44, GREEN, "model.py", "load, LoRA, FSDP2"),
        room(368, 524, 120, 32, GREEN, "checkpoints.py"),
        room(498, 524, 78, 32, GREEN, "logs.py"),
        # the client and the foundation
        rect(596, 78, 104, 490, PURPLE),
        text(602, 95, "vllm_client.py", 11, "m b", INK),
        text(604, 163, "HTTP"),
        text(604, 520, "over nccl,"),
        text(604, 534, "CUDA IPC"),
        text(604, 548, "or gloo"),
        room(32, 584, 190, 46, GREY, "config.py", "every setting, checked first"),
        room(234, 584, 172, 46, GREY, "utils.py", "ranks, signals, exits"),
        floor(418, 584, 282, 46, "weights/"),
        room(490, 593, 98, 28, PURPLE, "transfer.py"),
        room(596, 593, 98, 28, PURPLE, "cuda_ipc.py"),
        # the way
        arrow((140, 44), (140, 106)),
        step(158, 53, 1, "prompt, images, columns"),
        arrow((186, 136), (228, 136)),
        arrow((186, 227), (228, 227), css="use"),
        step(372, 126, 2, "prompt: token ids"),
        arrow((356, 142), (596, 142)),
        arrow((700, 142), (736, 142)),
        step(372, 170, 3, "tokens, log-probs, versions"),
        arrow((736, 186), (700, 186)),
        arrow((596, 186), (356, 186)),
        text(745, 168, "samples completions"),
        step(372, 222, 4, ""),
        arrow((356, 240), (388, 240)),
        arrow((476, 240), (488, 240)),
        step(310, 290, 5, "the scored Group"),
        arrow((292, 260), (292, 302), (104, 302), (104, 338)),
        *(arrow((162 + 138 * place, 376), (184 + 138 * place, 376)) for place in range(3)),
        arrow((222, 412), (222, 446)),
        text(229, 440, "rows", 11.5, "", INK),
        arrow((331, 446), (331, 412)),
        text(338, 440, "log-probs", 11.5, "", INK),
        arrow((532, 412), (532, 470)),
        step(614, 448, 10, ""),
        text(604, 472, "weights,", 11.5, "", INK),
        text(604, 486, "version + 1", 11.5, "", INK),
        arrow((576, 500), (596, 500)),
        arrow((700, 500), (736, 500)),
        text(745, 504, "loads the weights,"),
        text(745, 518, "even mid-completion"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "house.svg")
    parser.parse_args().output.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
