"""Draw docs/house.svg: the files as rooms of a house, and the way of a Group through them.

    python scripts/picture.py [-o docs/house.svg]

The picture has its own background, so that it reads the same on a light and on a dark page.
"""

import argparse
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 900
HEIGHT = 1060
HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"
 width="{WIDTH}" height="{HEIGHT}" role="img"
 aria-label="The files, and the way of a Group through them">
<style>
text{{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#5b6472}}
.name{{font:600 12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1f2937}}
.says{{font-size:11.5px;fill:#1f2937}}
.mid{{text-anchor:middle}}
.count{{font-weight:600;fill:#fff;text-anchor:middle}}
rect{{stroke:#9aa5b4}}
.page{{fill:#fff;stroke:#d5dae1}}
.house{{fill:#f7f8fa;stroke:#3b4656}}
.floor{{fill:#fff}}
.blue{{fill:#e6f0fb}}
.orange{{fill:#fdf0db}}
.green{{fill:#e6f4ea}}
.purple{{fill:#efe9fa}}
.pink{{fill:#fce8f0}}
.grey{{fill:#eceff3}}
.rare{{fill-opacity:.35;stroke-dasharray:3 3}}
.way{{fill:none;stroke:#c2410c;stroke-width:2}}
.dashed{{stroke-width:1;stroke-dasharray:4 3}}
circle{{fill:#c2410c}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
 markerUnits="userSpaceOnUse" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#c2410c"/></marker></defs>"""

# The rooms by subject: files, and what each is for.
PROMPTS = {
    "data.py": "dataset rows to\ntoken ids, once",
    "processor.py": "chat template\nand tokenizer",
    "images.py": "of a row, for\npolicy and server",
}
ORDER = {
    "stream.py": "order of Groups,\nsampled ahead;\neach used once",
    "rollouts.py": "what train.py calls:\nGroups, evaluations,\nnew weights",
    "run.py": "what a run is\nmade of; its parts",
    "custom.py": "functions of\na recipe",
    "order.py": "which prompt is next",
}
GROUPS = {
    "sampling.py": "completions of\na Group",
    "scoring.py": "rewards of\na Group",
    "workers.py": "reward functions, in\nother processes",
    "group.py": "Group: a prompt,\nits completions",
}
SERVERS = {
    "servers.py": "which ones serve",
    "sending.py": "updates, to all",
    "proofs.py": "checks log-probs",
    "evaluation.py": "held-out problems",
}
RECORDS = {
    "batching.py": "rows, for the ranks",
    "metrics.py": "of a step",
    "logs.py": "files of a run,\nits printed lines",
}
POLICY = {
    "model.py": "load, DDP, FSDP2",
    "lora.py": "adapters in a model",
    "moving_reference.py": "follows the policy",
    "optimizer.py": "AdamW, its schedule",
    "low_memory.py": "8 and 4 bits",
    "vision.py": "models that see",
    "checkpoints.py": "save, load",
    "intact.py": "checks checkpoints",
}
PREFIXES = {
    "prefix_attention.py": "a row holds each prompt once;\nits completions do not see\neach other",
}
SENDING = {
    "publish.py": "whole tensors",
    "group.py": "of all servers",
}
SETTINGS = {"config.py": "every setting"}
RANKS = {"utils.py": "ranks, signals"}
SERVER = {"vllm_server.py": "vLLM, in processes\nof its own, on this\nor other machines"}
SERVING = {
    "app.py": "the routes",
    "sample.py": "ids in, arrays out",
    "messages.py": "what both sides say",
    "whole.py": "whole completions",
    "receiver.py": "weights, in a worker",
    "adapter.py": "a LoRA adapter",
}
CLIENT = {"vllm_client.py": ""}
ONLY_WHERE_USED = {
    "images.py", "evaluation.py", "vision.py",
    "lora.py", "moving_reference.py", "low_memory.py", "custom.py",
    "adapter.py",
}  # fmt: skip

BOXES = [  # x, y, width, height, css: what is no file
    (1, 1, WIDTH - 2, HEIGHT - 2, "page"),
    (16, 62, 712, 986, "house"),
    (758, 88, 124, 754, "purple"),  # more servers
    (753, 83, 124, 754, "purple"),
    (83, 14, 122, 30, "grey"),  # the dataset row
    (364, 1010, 26, 18, "green rare"),  # the legend
]
FLOORS = {  # x, y, width, height: a wall around rooms
    "rollouts/": (32, 78, 564, 336),
    "train.py": (32, 448, 564, 94),
    "training/": (32, 576, 320, 414),
    "weights/": (364, 742, 232, 148),
}
BY_WORDS = 0  # the height of a room that is as high as what it says
COLUMNS = [  # x and y of the first room, width, height and gap of each, css, the rooms downwards
    (44, 106, 123, BY_WORDS, 5, "blue", PROMPTS),
    (183, 106, 131, BY_WORDS, 6, "blue", ORDER),
    (322, 106, 137, BY_WORDS, 5, "blue", GROUPS),
    (467, 106, 121, BY_WORDS, 6, "blue", SERVERS),
    (44, 599, 141, BY_WORDS, 3, "green", RECORDS),
    (199, 599, 150, BY_WORDS, 3, "green", POLICY),
    (364, 576, 198, 154, 12, "pink", PREFIXES),
    (482, 752, 104, BY_WORDS, 10, "purple", SENDING),
    (32, 1002, 152, BY_WORDS, 12, "grey", SETTINGS),
    (196, 1002, 152, BY_WORDS, 12, "grey", RANKS),
    (604, 78, 114, 336, 12, "purple", CLIENT),
    (748, 78, 124, 408, 12, "purple", SERVER),
    (748, 510, 124, BY_WORDS, 12, "purple", SERVING),
]
LOOP = [44, 229, 414]  # x of train.py's parts
ROW = {"prompt": 64, "first": 40, "2nd": 30, "third": 40}  # widths of its parts
NOTES = [  # x, y, words
    (552, 54, "the trainer: one process a rank"),
    (748, 68, "any number of servers"),
    (757, 502, "server/"),
    (613, 174, "one server,\nover HTTP"),
    (613, 777, "over NCCL,\nCUDA IPC or gloo"),
    (373, 704, "log-probs as if each had\nits own prompt"),
    (398, 1023, "imported only where a setting needs it"),
]
STEPS = [  # x and y of its number, words
    (155, 119, ""),
    (302, 119, ""),
    (447, 119, ""),
    (765, 168, "samples\ncompletions"),
    (447, 187, ""),
    (61, 496, "advantages\nin each Group"),
    (173, 615, ""),
    (549, 590, ""),
    (246, 496, "loss and backward\nof each row"),
    (431, 496, "one division, then\nclip and AdamW"),
    (386, 775, "weights,\nversion + 1"),
    (765, 444, "loads weights,\neven within\na completion"),
]
PASSED = [  # x, y, what goes along an arrow
    (613, 128, "token ids"),
    (613, 154, "completions"),
    (184, 436, "scored Groups"),
    (159, 565, "Groups"),
    (391, 565, "log-probs"),
]
WAY = [  # points of arrows: the way of a Group, and of the weights back to the servers
    "144,44 144,106",  # a dataset row
    "167,134 183,134",
    "314,122 322,122",  # its Group, to a server
    "459,122 467,122",
    "588,122 604,122",
    "718,122 748,122",
    "748,138 718,138",  # and back
    "604,138 588,138",
    "467,138 459,138",
    "390,156 390,161",  # scored
    "322,202 318,202 318,150 314,150",
    "248,170 248,176",
    "183,207 175,207 175,431 150,431 150,474",  # trained
    "150,530 150,599",
    "185,616 199,616",
    "349,616 364,616",
    "382,576 382,530",
    "399,502 414,502",
    "574,530 574,752",  # weights
    "534,788 534,798",
    "586,815 748,815",
]
INSTEAD = "167,346 171,346 171,150 183,150"  # the way of saved Groups


def rect(x: int, y: int, width: int, height: int, css: str) -> str:
    """Draw a box; `css` are its classes."""
    corner = f'<rect x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'{corner} rx="6" class="{css}"/>'


def text(x: int, y: int, words: str, css: str = "") -> str:
    """Draw lines below each other, the first one's baseline at `y`."""
    names = f' class="{css}"' if css else ""
    drawn = []
    for line in words.splitlines():
        drawn.append(f'<text x="{x}" y="{y}"{names}>{escape(line, quote=False)}</text>')
        y += 14

    return "\n".join(drawn)


def column(
    x: int, y: int, width: int, height: int, gap: int, css: str, rooms: dict[str, str]
) -> list[str]:
    """Draw files below each other, lighter if they are imported only where a setting needs it."""
    drawn = []
    for name, purpose in rooms.items():
        tall = height or 22 + 14 * len(purpose.splitlines())
        lighter = " rare" if name in ONLY_WHERE_USED else ""
        drawn.append(rect(x, y, width, tall, css + lighter))
        drawn.append(text(x + 9, y + 16, name, "name"))
        drawn.append(text(x + 9, y + 30, purpose))
        y += tall + gap

    return drawn


def rooms() -> list[str]:
    """Draw the house, its rooms, and the servers outside."""
    drawn = []
    for box in BOXES:
        drawn.append(rect(*box))

    for name, (x, y, width, height) in FLOORS.items():
        drawn.append(rect(x, y, width, height, "floor"))
        drawn.append(text(x + 9, y + 16, name, "name"))

    for place in COLUMNS:
        drawn += column(*place)

    for x in LOOP:
        drawn.append(rect(x, 474, 170, 56, "orange"))

    return drawn


def packed_row() -> list[str]:
    """Draw a row of tokens, in the room of prefix_attention.py."""
    drawn = []
    x = 373

    for name, width in ROW.items():
        css = "orange" if name == "prompt" else "blue"
        drawn.append(rect(x, 654, width, 26, css))
        drawn.append(text(x + width // 2, 671, name, "mid"))
        x += width + 2

    return drawn


def arrow(points: str, css: str = "way") -> str:
    """Draw a line with a head, along `points`."""
    return f'<polyline points="{points}" class="{css}" marker-end="url(#head)"/>'


def way() -> list[str]:
    """Draw the way of a Group with its numbered steps."""
    drawn = [arrow(points) for points in WAY]
    drawn.append(arrow(INSTEAD, "way dashed"))

    for number, (x, y, words) in enumerate(STEPS, start=1):
        drawn.append(f'<circle cx="{x}" cy="{y}" r="9"/>')
        drawn.append(text(x, y + 4, str(number), "count"))
        drawn.append(text(x + 14, y + 4, words, "says"))

    for x, y, words in PASSED:
        drawn.append(text(x, y, words, "says"))

    return drawn


def draw() -> str:
    """Draw the picture as SVG."""
    notes = [text(x, y, words) for x, y, words in NOTES]
    row = text(144, 33, "dataset row", "says mid")
    parts = [HEAD, *rooms(), *packed_row(), *notes, row, *way(), "</svg>"]

    return "".join(part + "\n" for part in parts if part)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "house.svg")
    parser.parse_args().output.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
