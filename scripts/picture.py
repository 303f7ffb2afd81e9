"""Draw docs/house.svg: the files as rooms of a house, and the way of a Group through them.

    python scripts/picture.py [-o docs/house.svg]

The picture has its own background, so that it reads the same on a light and on a dark page.
"""

import argparse
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 900
HEIGHT = 988
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
    "sources.py": "of functions,\ntables, the hub",
    "processor.py": "chat template\nand tokenizer",
    "images.py": "of a row, for\npolicy and server",
    "replay.py": "saved Groups, in\nplace of servers",
}
ORDER = {
    "stream.py": "order of Groups,\nsampled ahead;\neach ends once",
    "rollouts.py": "the loop's side:\nGroups, held-out\nscores, weights",
    "own_rollouts.py": "completions of\na rollout_fn",
    "order.py": "what order_fn\nchooses",
}
GROUPS = {
    "sampling.py": "completions of\na Group",
    "scoring.py": "rewards of\na Group",
    "workers.py": "reward calls, with\na time-out",
    "own_advantages.py": "what advantage_fn\ngives",
    "group.py": "Group: a prompt,\nits completions",
}
SERVERS = {
    "servers.py": "leased, lost",
    "addresses.py": "that may change",
    "proofs.py": "of their weights",
    "adapters.py": "LoRA adapters",
    "sleep.py": "taking turns",
    "references.py": "of the reference",
    "evaluation.py": "held-out problems",
}
RECORDS = {
    "batching.py": "rows, for the ranks",
    "metrics.py": "of a batch",
    "mismatches.py": "of servers",
    "logs.py": "files of a run",
    "samples.py": "completions",
    "thumbnails.py": "images",
    "terminal.py": "its lines",
    "trackers.py": "wandb, trackio",
    "hooks.py": "trial of own code",
}
POLICY = {
    "model.py": "load, DDP, FSDP2",
    "lora.py": "adapters",
    "moving_reference.py": "an average",
    "optimizer.py": "AdamW, its schedule",
    "low_memory.py": "in 8 and 4 bits",
    "vision.py": "its vision tower",
    "rare_attention.py": "for a few families",
    "checkpoints.py": "save, and go on",
    "resume.py": "the newest whole one",
    "intact.py": "no weight is missing",
}
PREFIXES = {
    "prefix_attention.py": "a row holds each prompt once;\nits completions do not see\neach other",
}
SENDING = {
    "publish.py": "whole tensors",
    "transfer.py": "on the wire",
    "shared.py": "to several servers",
}
ARRIVING = {"cuda_ipc.py": "on one GPU", "arrival.py": "in a worker"}
SETTINGS = {"config.py": "every setting"}
PARAMETERS = {"vllm_params.py": "settings of vLLM"}
RANKS = {"utils.py": "ranks, signals"}
HEARTBEAT = {"heartbeat.py": "rank 0 lives"}
SERVER = {"vllm_server.py": "vLLM, in processes\nof its own, on this\nor other machines"}
SERVING = {
    "route.py": "ids in, arrays out",
    "messages.py": "on the wire",
    "whole.py": "in the engine",
    "update.py": "new weights",
    "receiver.py": "in a worker",
    "staging.py": "while it samples",
    "adapter.py": "a LoRA adapter",
}
CLIENT = {"vllm_client.py": ""}
ONLY_WHERE_USED = {
    "images.py", "replay.py", "references.py", "evaluation.py", "trackers.py", "vision.py",
    "rare_attention.py", "hooks.py", "lora.py", "moving_reference.py", "low_memory.py", "cuda_ipc.py", "shared.py", "arrival.py", "own_rollouts.py", "vllm_params.py",
    "adapters.py", "sleep.py", "adapter.py", "resume.py", "heartbeat.py", "sources.py", "own_advantages.py", "order.py",
}  # fmt: skip

BOXES = [  # x, y, width, height, css: what is no file
    (1, 1, WIDTH - 2, HEIGHT - 2, "page"),
    (16, 62, 712, 910, "house"),
    (758, 88, 124, 736, "purple"),  # more servers
    (753, 83, 124, 736, "purple"),
    (83, 14, 122, 30, "grey"),  # the dataset row
    (520, 929, 26, 18, "green rare"),  # the legend
]
FLOORS = {  # x, y, width, height: a wall around rooms
    "rollouts/": (32, 78, 564, 300),
    "train.py": (32, 412, 564, 94),
    "training/": (32, 540, 320, 364),
    "weights/": (364, 706, 232, 172),
}
COLUMNS = [  # x and y of the first room, width, height and gap of each, css, the rooms downwards
    (44, 106, 123, 48, 5, "blue", PROMPTS),
    (183, 106, 123, 60, 8, "blue", ORDER),
    (322, 106, 123, 48, 5, "blue", GROUPS),
    (461, 106, 123, 34, 4, "blue", SERVERS),
    (44, 563, 141, 32, 4, "green", RECORDS),
    (199, 563, 147, 32, 1, "green", POLICY),
    (364, 540, 198, 154, 12, "pink", PREFIXES),
    (482, 716, 102, 43, 12, "purple", SENDING),
    (374, 771, 102, 43, 12, "purple", ARRIVING),
    (32, 916, 112, 44, 12, "grey", SETTINGS),
    (154, 916, 112, 44, 12, "grey", PARAMETERS),
    (276, 916, 112, 44, 12, "grey", RANKS),
    (398, 916, 112, 44, 12, "grey", HEARTBEAT),
    (604, 78, 114, 746, 12, "purple", CLIENT),
    (748, 78, 124, 371, 12, "purple", SERVER),
    (748, 461, 124, 40, 12, "purple", SERVING),
]
LOOP = [44, 229, 414]  # x of train.py's parts
ROW = {"prompt": 64, "first": 40, "2nd": 30, "third": 40}  # widths of its parts
NOTES = [  # x, y, words
    (552, 54, "the trainer: one process a rank"),
    (748, 68, "any number of servers"),
    (613, 174, "one server,\nover HTTP"),
    (613, 750, "over NCCL,\nCUDA IPC\nor gloo"),
    (373, 668, "log-probs as if each had\nits own prompt"),
    (554, 942, "imported only where used"),
]
STEPS = [  # x and y of its number, words
    (155, 119, ""),
    (294, 119, ""),
    (433, 119, ""),
    (765, 168, "samples\ncompletions"),
    (433, 187, ""),
    (61, 460, "advantages\nin each Group"),
    (173, 579, ""),
    (549, 554, ""),
    (246, 460, "loss and backward\nof each row"),
    (431, 460, "one division, then\nclip and AdamW"),
    (386, 739, "weights,\nversion + 1"),
    (765, 395, "loads weights,\neven within\na completion"),
]
PASSED = [  # x, y, what goes along an arrow
    (613, 128, "token ids"),
    (613, 154, "completions"),
    (254, 399, "scored Groups"),
    (159, 529, "Groups"),
    (391, 529, "log-probs"),
]
WAY = [  # points of arrows: the way of a Group, and of the weights back to the servers
    "144,44 144,106",  # a dataset row
    "167,134 183,134",
    "306,124 322,124",  # its Group, to a server
    "445,124 461,124",
    "584,124 604,124",
    "718,124 748,124",
    "748,142 718,142",  # and back
    "604,142 584,142",
    "461,142 445,142",
    "384,154 384,159",  # scored
    "322,202 314,202 314,150 306,150",
    "244,166 244,174",
    "183,204 175,204 175,395 150,395 150,438",  # trained
    "150,494 150,566",
    "185,586 199,586",
    "346,586 364,586",
    "382,540 382,494",
    "399,466 414,466",
    "574,494 574,716",  # weights
    "533,759 533,771",
    "584,792 604,792",
    "718,792 748,792",
]
INSTEAD = "167,338 171,338 171,150 183,150"  # the way of saved Groups


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
    """Draw files below each other, lighter if they are imported only where used."""
    drawn = []
    for name, purpose in rooms.items():
        lighter = " rare" if name in ONLY_WHERE_USED else ""
        drawn.append(rect(x, y, width, height, css + lighter))
        drawn.append(text(x + 9, y + 16, name, "name"))
        drawn.append(text(x + 9, y + 30, purpose))
        y += height + gap

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
        drawn.append(rect(x, 438, 170, 56, "orange"))

    return drawn


def packed_row() -> list[str]:
    """Draw a row of tokens, in the room of prefix_attention.py."""
    drawn = []
    x = 373

    for name, width in ROW.items():
        css = "orange" if name == "prompt" else "blue"
        drawn.append(rect(x, 618, width, 26, css))
        drawn.append(text(x + width // 2, 635, name, "mid"))
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
