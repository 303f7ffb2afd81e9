"""Images from the dataset to the gradient: rows, prompts, rows of mixed batches, the real server."""

import base64
import dataclasses
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import requests
import torch
import torch.distributed as dist
import transformers
import vision_models
from build_tiny_vlm import TEMPLATE, build, build_processor
from helpers import ROOT, flags, make_tokenizer, on_forked_ranks, on_ranks, read, server, table
from PIL import Image
from test_gradients import sgd, trainable
from test_prefix_vision import plain_logprobs
from test_templates import user
from tokenizers.processors import TemplateProcessing
from torch.distributed.tensor import DTensor

import prefix_attention
from config import TrainConfig, UserError, to_json
from recipes.replay import Replay, save
from recipes.rewards import exact_match
from recipes.tiny_vlm import squares
from rollouts.data import check_vocabulary, leave_out_long, load_sets
from rollouts.group import Completion, Group, Prompt, version_spans
from rollouts.images import Images, image_example, joined_images, open_image, with_tokens
from rollouts.processor import hold_date, load_processor
from rollouts.rollouts import Rollouts
from rollouts.sampling import sample_group
from train import train_batch
from training.batching import Dealer, micro_batches
from training.model import build_policy, build_reference, share_prefixes, token_logprobs
from utils import broadcast_object, is_main, process_group
from vllm_client import ServerError

PLACE = {"type": "image"}
IMAGE_TOKENS = 16  # of a 64 x 64 image: 8 x 8 patches, merged by four
SEEN = "<|vision_start|>" + IMAGE_TOKENS * "<|image_pad|>" + "<|vision_end|>"


def picture(number):
    return squares(number + 1, seed=5)[number]["image"]


def rows():
    """One image, none, two of them in the messages' places, one in a column of the other name."""
    inside = [PLACE, {"type": "text", "text": "or"}, PLACE]
    return [
        {"prompt": "Colour?", "image": picture(0), "answer": "red"},
        {"prompt": "No picture.", "image": None, "answer": "blue"},
        {"prompt": [user(inside)], "images": [picture(1), picture(2)], "answer": "red"},
        {"prompt": [user("What?")], "images": [picture(3)], "answer": "pink"},
    ]


def make_config(model="m", url="http://x", **fields):
    defaults = {
        "dataset_id": rows, "reward_funcs": [exact_match], "num_generations": 2, "batch_size": 4,
        "max_completion_len": 12, "server_timeout": 60.0, "grad_norm": 0, "off_policy_correction": "none",
    }  # fmt: skip
    return TrainConfig(model_id=model, vllm_urls=[url], **{**defaults, **fields})


# -- rows ------------------------------------------------------------------------------------------------------------


def processed(prompt, processor=None, config=None):
    """The prompt with its images, as it is when it is sampled; and these."""
    prompt = with_tokens(prompt, processor or build_processor(), config or make_config())
    return prompt, prompt.images


def load(source, max_prompt_len=100, processor=None, **fields):
    config = make_config(dataset_id=source, **fields)
    (prompts,) = load_sets("dataset_id", "train", processor or build_processor(), config).values()
    return leave_out_long(prompts, max_prompt_len, config)


def test_prompts_of_mixed_rows():
    """Each image takes 16 tokens between its two marks, where the messages have it or before the text."""
    decode = build_processor().tokenizer.decode
    prompts = load(rows)
    texts = [decode(prompt.token_ids) for prompt in prompts]
    assert texts == [SEEN + "Colour?", "No picture.", SEEN + "or" + SEEN, SEEN + "What?"]
    assert [len(p.sources) for p in prompts] == [1, 0, 2, 1]
    assert all(p.images is None for p in prompts)  # processed again when they are sampled
    assert prompts[0].columns == {"answer": "red"}  # rewards get no pixels unless they ask
    ready, images = processed(prompts[2])
    assert ready.token_ids == prompts[2].token_ids
    assert decode(images.server_ids) == vision_models.IMAGE + "or" + vision_models.IMAGE
    assert images.inputs["image_grid_thw"].tolist() == [[1, 8, 8], [1, 8, 8]]
    assert images.inputs["pixel_values"].shape == (128, 3 * 2 * 8 * 8)
    for url, number in zip(images.urls, (1, 2), strict=True):
        sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        assert sent.tobytes() == picture(number).tobytes()


def test_a_saved_group_gets_its_images_back(tmp_path):
    """They are not in the file: a replay processes them anew."""
    prompts, processor = load(rows), build_processor()
    config = make_config(batch_size=1, output_dir=str(tmp_path), parts=["recipes.replay.save"])
    prompt, images = processed(prompts[2], processor, config)
    completion = Completion([5, 6], [-1.0, -0.5], "stop", 0)
    group = Group(prompt, [completion], rewards=table([[1.0]]))
    of_run = {"config": config, "before": {"step": 0}, "prompts": prompts, "processor": processor}
    run: Any = SimpleNamespace(**of_run, on_step=[])
    save(run)
    run.on_step[0](1, {}, [group])
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    Replay(tmp_path)(run)
    (saved,) = run.choose(0)
    assert not saved.prompt.images
    run.fill(saved)
    torch.testing.assert_close(saved.prompt.images.inputs, images.inputs, rtol=0, atol=0)


def test_images_in_every_shape(tmp_path):
    def sent(image):
        (prompt,) = load(lambda: [{"prompt": "a", "image": image}])
        return processed(prompt)[1].urls

    original = picture(0)
    path = tmp_path / "a.png"
    original.save(path)
    content = path.read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    of_dataset = [{"bytes": content, "path": None}, {"bytes": None, "path": str(path)}]
    for source in (str(path), content, url, *of_dataset):
        assert sent(source) == sent(original)
        assert open_image(source) == original
    assert open_image(original.convert("L")).mode == "RGB"
    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.new("RGB", (40, 20)).save(turned, exif=exif)
    assert open_image(str(turned)).size == (20, 40)


def test_messages_as_datasets_fills_them():
    """Every part has the keys of all parts, without values; the published templates go by the keys."""
    processor = build_processor()
    by_keys = TEMPLATE.replace("if part['type']", "if 'image' in part or part['type']")
    processor.chat_template = by_keys.replace("{% for part", "{{ message['role'] }}:{% for part")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Colour?", "image": None}]
    system = {"role": "system", "content": [{"type": "text", "text": "See.", "image": None}]}
    row = {"prompt": [system, user(parts)], "image": picture(0)}
    (prompt,) = load(lambda: [row], processor=processor)
    assert processor.tokenizer.decode(prompt.token_ids) == f"system:See.user:{SEEN}Colour?"
    system["content"] = "See."  # without places the image stands before the user's text
    row["prompt"][1]["content"] = "Colour?"
    assert load(lambda: [row], processor=processor)[0].token_ids == prompt.token_ids


def test_images_inside_messages_keep_the_arguments_of_the_template(tmp_path):
    """The text is made again where the images are."""
    processor = build_processor()
    processor.chat_template += "{% if not enable_thinking %}(no thought){% endif %}"  # type: ignore[operator]
    picture(1).save(tmp_path / "b.png")
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": picture(0)},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "b.png")}},
    ]
    row = {"prompt": [user(parts)], "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = load(lambda: [row], processor=processor)
    assert len(prompt.sources) == 2
    assert json.dumps(prompt.content)  # for completions.jsonl
    assert processor.tokenizer.decode(prompt.token_ids).endswith("(no thought)")
    assert with_tokens(prompt, processor, make_config()).token_ids == prompt.token_ids


def test_images_that_no_server_takes_name_their_row(monkeypatch):
    monkeypatch.setattr("rollouts.images.MAX_IMAGES_BYTES", 1 << 20)
    noise = torch.randint(256, (480, 480, 3), dtype=torch.uint8).numpy()
    photo = Image.fromarray(noise)  # 0.9 MiB in base64
    message = "row 2: its images have more than 1 MiB, as PNG in base64: make them smaller"
    with pytest.raises(UserError, match=message):
        load(lambda: [*rows()[:2], {"prompt": "a", "images": [photo, photo]}])
    (prompt,) = load(lambda: [{"prompt": "a", "image": photo}], max_prompt_len=10_000)
    assert prompt.sources


def test_a_processor_with_a_date_is_held_and_saved(tmp_path):
    processor = build_processor()
    processor.chat_template = "{{ strftime_now('%Y') }}" + processor.chat_template  # type: ignore[operator]
    hold_date(processor, "1999-12-31T23:59:59")
    (prompt,) = load(lambda: rows()[:1], processor=processor)
    assert processor.tokenizer.decode(prompt.token_ids).startswith("1999")
    processor.save_pretrained(tmp_path)
    assert load_processor(make_config(str(tmp_path))).chat_template == processor.chat_template


def test_beginning_of_sequence(tmp_path):
    """A template that leaves it to the tokenizer gets it once, as transformers has it; one that writes it, no more."""
    processor = load_processor(make_config(vision_models.save("llava", tmp_path)))
    backend = processor.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    row = {"prompt": "Colour?", "image": picture(0)}
    for template in (processor.chat_template, "<bos>" + processor.chat_template):
        processor.chat_template = template
        (prompt,) = load(lambda: [row], processor=processor)
        assert prompt.token_ids.count(1) == 1
        assert prompt.token_ids[0] == 1
        _, images = processed(prompt, processor)
        assert images.server_ids[:2] == [1, processor.image_token_id]


def test_a_dataset_of_images(tmp_path):
    """As `datasets` stores them: not decoded before they are needed."""
    rows_of = lambda rows: [{"prompt": "x", "images": row["images"]} for row in rows]
    prompts = load(geometry(tmp_path), collate_fn=rows_of)
    assert [[*map(type, prompt.sources)] for prompt in prompts] == [[bytes], [bytes]]


def as_png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


NO_IMAGE = "no image, path, URL, bytes or base64: "
BROKEN = [
    ({"prompt": "a", "image": "nowhere.png"}, NO_IMAGE + "'nowhere.png'"),
    ({"prompt": "a", "image": "/nowhere/a.png"}, NO_IMAGE + "'/nowhere/a.png'"),
    ({"prompt": "a", "image": {"foo": 1}}, NO_IMAGE + "{'foo': 1}"),
    ({"prompt": "a", "image": b"no image"}, NO_IMAGE + "b'no image': UnidentifiedImageError: "),
    ({"prompt": "a", "image": as_png(picture(0))[:-2000]}, "OSError: .*truncated"),
    ({"prompt": "a", "image": "b.png", "images": ["c.png"]}, "it has images in two places"),
    ({"prompt": [user([{"type": "image", "image": "a"}])], "image": "b"}, "images in two places"),
    ({"prompt": [user([PLACE])]}, "has 0 images for the 1 places in its messages"),
    ({"prompt": [user([PLACE])], "images": [picture(0)] * 2}, "has 2 images for the 1 places in "),
    ({"prompt": [user("<|image_pad|>")], "image": picture(0)}, "2 places for its 1 images"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_rows_are_named(row, message):
    with pytest.raises(UserError, match=f"dataset row 1: .*{message}"):
        load(lambda: [{"prompt": "fine"}, row])


@pytest.mark.parametrize(("token", "image"), [("image_pad", None), ("video_pad", picture(0))])
def test_placeholders_without_images_are_refused(vlm, token, image):
    prompts = load(lambda: [*rows(), {"prompt": f"look: <|{token}|>", "image": image}])
    processor, model_config = build_processor(), transformers.AutoConfig.from_pretrained(vlm)
    check_vocabulary(prompts[:-1], processor, model_config)
    message = f"row 4 of dataset_id: its token .*{token}.* stands for an image"
    with pytest.raises(UserError, match=message):
        check_vocabulary(prompts, processor, model_config)


def test_images_that_have_no_place_are_refused():
    with pytest.raises(UserError, match="row 0: its text has 0 places .*a model that takes imag"):
        load(rows, processor=make_tokenizer())
    with pytest.raises(UserError, match="row 0: its text has 0 places for its 1 images"):
        load(rows, no_apply_chat_template=True)
    frozen = make_config(freeze_vision_tower=True)
    with pytest.raises(UserError, match="freeze_vision_tower has no effect: no prompt has an imag"):
        image_example(load(lambda: [{"prompt": "text"}]), build_processor(), frozen)


def test_processor_arguments(vlm):
    """A quarter of the pixels is a quarter of the tokens; odd ones are refused."""
    config = make_config(vlm, processor_kwargs={"max_pixels": 32 * 32, "min_pixels": 32 * 32})
    prompt, images = processed(load(rows)[0], load_processor(config), config)
    assert images.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert len(prompt.token_ids) == 2 + IMAGE_TOKENS // 4 + len("Colour?")

    with pytest.raises(ValueError, match=r"takes no max_pixel, but .*max_pixels"):
        load_processor(make_config(vlm, processor_kwargs={"max_pixel": 9}))
    config = make_config(vlm, processor_kwargs={"image_mean": [0, 0, 0]})
    with pytest.raises(ValueError, match=r"row 0: .*mean"):
        load(rows, processor=load_processor(config))


def test_a_url_is_asked_once(tmp_path, monkeypatch):
    picture(0).save(tmp_path / "a.png")
    asked = []
    noting = lambda handler, *_: asked.append(handler.path)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", noting)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}"
        (prompt,) = load(lambda: [{"prompt": "Colour?", "image": f"{address}/a.png"}])
        processed(prompt)
        assert asked == ["/a.png"]
        with pytest.raises(ValueError, match=r"row 0: HTTPError: 404 .*/b.png"):
            load(lambda: [{"prompt": "a", "image": f"{address}/b.png"}])
        web.shutdown()


def geometry(folder):
    """Rows by the schema of hiyouga/geometry3k, for test_recipes.py."""
    text, images = datasets.Value("string"), datasets.List(datasets.Image())
    data = {
        "images": [[picture(0)], [picture(1)]],
        "problem": ["<image>Find x.", "<image>Find the area of the figure."],
        "answer": ["3", "2 \\sqrt { 3 }"],
    }
    features = datasets.Features({"images": images, "problem": text, "answer": text})
    path = str(folder / "geometry.parquet")
    datasets.Dataset.from_dict(data, features=features).to_parquet(path)
    return path


# -- gradients -------------------------------------------------------------------------------------------------------

LENGTHS = [[4, 7], [3, 9], [6, 2], [5, 5]]
ADVANTAGES = [[0.9, -0.4], [-1.1, 0.3], [1.2, -0.7], [0.5, -0.6]]


def make_groups(model_id):
    config = make_config(model_id)
    processor = load_processor(config)
    groups = []
    prompts = load(rows, processor=processor)
    for prompt, lengths, advantages in zip(prompts, LENGTHS, ADVANTAGES, strict=True):
        completions = [Completion([*range(7 * n, 8 * n)], [-3.0] * n, "stop", 0) for n in lengths]
        prompt = with_tokens(prompt, processor, config)
        groups.append(Group(prompt, completions, advantages=advantages))
    return groups


@cache
def plain_gradient(model_id):
    """Σ -A·log p over plain rows of the model's own forward, over all tokens; placeholders have no probability."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_id, dtype=torch.float32)
    image = model.config.image_token_id
    rows, images = [], []
    for group in make_groups(model_id):
        rows.append((group.prompt.token_ids, [c.token_ids.tolist() for c in group.completions]))
        images.append(group.prompt.images.inputs if group.prompt.images else {})
    placeholders = [image, getattr(model.config, "video_token_id", image)]
    logprobs = plain_logprobs(model, rows, images, placeholders)
    advantages = torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor(LENGTHS).flatten())
    (-advantages @ logprobs / len(logprobs)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained_difference(config, device):
    """What a step of SGD with learning rate 1 subtracts from each weight, through the real path; collective."""
    groups = make_groups(config.model_id)
    policy = build_policy(config, device, groups[0].prompt)
    config = share_prefixes(policy, config, groups[0].prompt)
    reference = build_reference(policy, config, device, groups[0].prompt)
    before = trainable(policy)
    ranks = Dealer(dist.get_world_size(), config).deal(groups, is_complete=True)
    kinds = {bool(micro.images) for rows in ranks for micro in rows}
    train_batch(policy, reference, *sgd(policy), ranks[dist.get_rank()], config, device)
    return {name: before[name] - weight for name, weight in trainable(policy).items()}, kinds


def assert_same(got, expected):
    """As in test_gradients.py: sums in another order, read off weights of size 1. What has no gradient is not moved."""
    expected = {name: expected.get(name, torch.zeros_like(moved)) for name, moved in got.items()}
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=5e-6)


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [10_000, 90, 50])
def test_any_split_equals_plain_rows(vlm, max_tokens, share_prefix, device):
    config = make_config(vlm, max_tokens_per_gpu=max_tokens, share_prefix=share_prefix)
    got, _ = trained_difference(config, device)
    assert any(".visual." in name and difference.any() for name, difference in got.items())
    assert_same(got, plain_gradient(vlm))


def test_images_of_several_sizes_in_one_row():
    """Their features are those of each alone: the tower is told what is padding."""
    torch.manual_seed(0)
    text = {"model_type": "mistral", "vocab_size": 97}
    tower = {"model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 32, "image_size": 64}
    shape = transformers.Mistral3Config(
        text_config=vision_models.TEXT | text,
        vision_config=vision_models.TOWER | tower,
        image_token_index=10,
    )
    model = transformers.Mistral3ForConditionalGeneration(shape).double()
    inputs = [
        {"pixel_values": torch.randn(1, 3, *size).double(), "image_sizes": torch.tensor([size])}
        for size in ((32, 64), (64, 32), (48, 48))  # pixels
    ]
    prompts = [Prompt(0, [1], "", {}, images=Images([1], 1, [], values)) for values in inputs]
    features = lambda values: torch.cat(model.get_image_features(**values).pooler_output)
    alone = torch.cat([*map(features, inputs)])
    joined = features(joined_images(prompts))
    # Kernels may sum rows of other lengths in another order, and the norms compute in fp32: 6e-8 of features of 0.003.
    torch.testing.assert_close(joined, alone, rtol=0, atol=1e-8)
    for values in inputs:
        del values["image_sizes"]
    with pytest.raises(UserError, match="images with pixel_values of several sizes"):
        joined_images(prompts)


HALVES = [{"bf16": True}, {"use_fsdp": True, "fsdp_bf16": True}, {"dtype": "bfloat16"}]


@pytest.mark.parametrize("fields", HALVES, ids=str)
def test_half_precision_keeps_the_direction(vlm, fields, device):
    """To bf16's 3 digits: cosine 0.999 with the gradients of plain fp32 rows, over all weights and over the tower's."""
    got, _ = trained_difference(make_config(vlm, gradient_checkpoint=True, **fields), device)
    expected = plain_gradient(vlm)
    for part in ("", ".visual."):
        names = [name for name in expected if part in name]
        joined = lambda grads, of=names: torch.cat([grads[n].flatten().double() for n in of])
        ours, plain = joined(got), joined(expected)
        assert ours @ plain >= 0.999 * ours.norm() * plain.norm()


def ranks_main(model, max_tokens, folder):
    # With a KL term, whose gradient is 0 where the reference is the policy.
    config = make_config(model, max_tokens_per_gpu=int(max_tokens), beta=0.1)
    with process_group(60) as device:
        kinds = (config, dataclasses.replace(config, use_fsdp=True))
        found = [trained_difference(kind, device) for kind in kinds]
        if dist.get_rank() == 0:
            torch.save(found, f"{folder}/found.pt")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_mixed_batches_on_two_ranks(vlm, tmp_path, family):
    """Micro-batches with and without images, side by side on two ranks; LLaVA's last layer of vision is not used."""
    model = vlm if family == "qwen2_5_vl" else vision_models.save(family, tmp_path)
    max_tokens = 40 if family == "gemma3" else 50  # too few for a group without images beside one
    on_ranks(2, tmp_path, "test_images.ranks_main", model, max_tokens, tmp_path)
    for got, kinds in torch.load(tmp_path / "found.pt"):  # by DDP, and by FSDP2
        assert kinds == {True, False}
        assert_same(got, plain_gradient(model))


def test_a_model_that_must_be_compared(vlm, monkeypatch, capsys, device):
    """Policy and reference of a type that the tests do not cover share prefixes if their images are exact."""
    monkeypatch.setattr(prefix_attention, "VISION", frozenset())
    config, groups = make_config(vlm, beta=0.1), make_groups(vlm)
    (micro,) = micro_batches(groups, 10_000, config)
    seen = []
    policy = build_policy(config, device, groups[0].prompt)
    assert share_prefixes(policy, config, groups[0].prompt).share_prefix
    policy.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    logprobs = token_logprobs(policy, micro.packed, micro.images, config)
    assert seen == [4 * 64]  # patches of the images of three prompts, not of six completions
    reference = build_reference(policy, config, device, groups[0].prompt)
    assert reference
    assert torch.equal(reference(micro.packed, micro.images), logprobs)
    odd = lambda base, row, *_: row.position_ids
    monkeypatch.setattr(prefix_attention, "_rope_positions", odd)
    assert not share_prefixes(policy, config, groups[0].prompt).share_prefix
    assert "share_prefix is off" in capsys.readouterr().out


def test_frozen_parts(vlm, device):
    """What trains, in the tower and beside it; the projector is its `merger`."""
    example = make_groups(vlm)[0].prompt

    def trained(example=example, **fields):
        policy = build_policy(make_config(vlm, **fields), device, example)
        names = {name for name, weight in policy.named_parameters() if weight.requires_grad}
        return {name for name in names if ".visual." in name}, names

    whole_tower, names = trained()
    frozen = {"freeze_vision_tower": True}
    projector = {name for name in whole_tower if ".merger." in name}
    assert projector < whole_tower
    assert trained(**frozen) == (projector, names - whole_tower | projector)
    assert trained(example=None) == (set(), names - whole_tower)  # a run on text alone

    of_tower, _ = trained(use_peft=True)
    assert not all(".merger." in name for name in of_tower)
    of_tower, names = trained(use_peft=True, **frozen)
    assert all(".merger." in name for name in of_tower)
    assert of_tower < names
    _, names = trained(use_peft=True, lora_target_modules=["q_proj", "v_proj"], **frozen)
    assert {name.split(".")[-4] for name in names} == {"q_proj", "v_proj"}


# -- the real server -------------------------------------------------------------------------------------------------


def worst_mismatch(rollouts, policy, config, device):
    """Largest |trainer - server| over fresh completions of every prompt, in shared and in plain rows."""
    groups: list[Group] = []
    for prompt in rollouts.run.prompts if is_main() else ():
        group = Group(prompt, advantages=[0.0] * config.num_generations)
        sample_group(group, rollouts.pool, rollouts.run.processor, config)
        groups.append(group)
    groups = broadcast_object(groups)
    worst = 0.0
    for share_prefix in (True, False):
        own = dataclasses.replace(config, share_prefix=share_prefix)
        for micro in micro_batches(groups, 10_000, own):
            pixels = {name: value.to(device) for name, value in micro.images.items()}
            with torch.no_grad():
                logprobs = token_logprobs(policy, micro.packed.to(device), pixels, config)
            worst = max(worst, (logprobs - micro.sampler_logprobs).abs().max().item())
    return worst, groups


@contextmanager
def on_server(model, url, **fields):
    """A run whose server has the first weights: its rollouts, policy, config and device."""
    config = make_config(model, url, **fields)
    with process_group(120) as device, closing(Rollouts(config, device)) as rollouts:
        policy = build_policy(config, device, rollouts.example)
        config = share_prefixes(policy, config, rollouts.example)
        assert config.share_prefix
        rollouts.publish(policy, 0)
        yield rollouts, policy, config, device


def test_an_image_that_would_fill_the_memory_is_refused(vlm, vlm_server):
    """A few bytes that are 200 million pixels: an error (500 is vLLM's), and it goes on."""
    token = transformers.AutoConfig.from_pretrained(vlm).image_token_id

    def status(side):
        png = base64.b64encode(as_png(Image.new("1", (side, side)))).decode()
        body = {"token_ids": [5, token, 6], "sampling_params": {"max_tokens": 2}}
        body["images"] = [f"data:image/png;base64,{png}"]
        return requests.post(f"{vlm_server}/sample", json=body, timeout=60).status_code

    assert status(14_000) in (400, 500)
    assert status(56) == 200


def test_server_and_trainer_agree(vlm, vlm_server):
    """On image and text prompts, before and after an update of the vision tower alone, to fp32's rounding."""
    with on_server(vlm, vlm_server, temperature=0.8) as (rollouts, policy, config, device):
        worst, _ = worst_mismatch(rollouts, policy, config, device)
        assert worst <= 1e-4
        with torch.no_grad():
            for weight in policy.model.visual.parameters():
                own = torch.Generator().manual_seed(weight.numel())
                weight.add_(0.1 * torch.randn(weight.shape, generator=own))
        worst, _ = worst_mismatch(rollouts, policy, config, device)
        assert worst > 1e-2
        rollouts.publish(policy, 1)
        # The same images again: neither K/V nor features of the old tower serve them.
        worst, _ = worst_mismatch(rollouts, policy, config, device)
        assert worst <= 1e-4


def changed(policy):
    """Every weight that trains moved, alike in all its shards; by little.

    With sharper attention both sides are at times 1e-4 off what fp64 computes. Here 6e-6, and 0.4 under older weights.
    """
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                local.mul_(1.02).add_(0.002)


def sync_main(model, url, fields):
    with on_server(model, url, **json.loads(fields)) as (rollouts, policy, config, device):
        for version in (1, 2):  # the second shows that the first left nothing behind
            changed(policy)
            rollouts.publish(policy, version)
        worst, _ = worst_mismatch(rollouts, policy, config, device)
        assert worst <= 1e-4, worst


@pytest.mark.parametrize("use_peft", [False, True], ids=["full", "lora"])
def test_sync_of_shards(vlm, vlm_server, tmp_path, use_peft):
    """FSDP2 over two ranks, tower and all: the server has what the trainer computes with."""
    fields = json.dumps({"use_fsdp": True, "use_peft": use_peft})
    on_ranks(2, tmp_path, "test_images.sync_main", vlm, vlm_server, fields)


def test_an_update_in_the_middle_of_completions(vlm, vlm_server):
    """Their image is in a cached prefix when they begin, and the update makes the server read it again."""
    sampling = {"n": 4, "max_tokens": 80, "ignore_eos": True, "temperature": 1.0}
    with on_server(vlm, vlm_server) as (rollouts, policy, config, _):
        prompt, images = processed(rollouts.run.prompts[2])
        first_block = prompt.token_ids[:32]  # of the server's cache
        assert policy.config.vision_end_token_id in first_block
        ask = partial(rollouts.pool.servers[0].generate, prompt.token_ids, images=images)
        for version in range(1, 20):  # until an update hits some
            changed(policy)
            ask(sampling | {"max_tokens": 1})
            with ThreadPoolExecutor(1) as pool:
                reply = pool.submit(ask, sampling)
                rollouts.publish(policy, version)
            hits = [c for c in reply.result() if len(version_spans(c.weight_versions)) == 2]
            if hits:
                break
        rows = [(prompt.token_ids, [hits[0].token_ids])]
        (row,) = prefix_attention.pack(rows, share_prefix=False)
        with torch.no_grad():
            under_new = token_logprobs(policy, row, joined_images([prompt]), config)
    _, (_, change, _) = version_spans(hits[0].weight_versions)
    assert (under_new - hits[0].sampler_logprobs)[change:].abs().max() <= 1e-4


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("llava", "gemma3")]


@pytest.mark.parametrize("family", ["qwen3_vl", *SLOW])
def test_other_families_with_the_server(family, tmp_path, monkeypatch):
    """Images expand alike, names are the checkpoint's: agreement after an update of everything, tower by LoRA."""
    model = vision_models.save(family, tmp_path)
    if family == "gemma3":  # whose image tokens see each other, but not in vLLM's attention on CPU
        monkeypatch.setattr(prefix_attention, "WHOLE_IMAGES", frozenset())
        monkeypatch.setattr(prefix_attention, "_kinds", lambda base, ids: torch.zeros_like(ids))
    with server(model, tmp_path / "log", "--limit-mm-per-prompt", '{"image": 2}') as started:
        sync_main(model, started.wait(), json.dumps({"use_peft": True}))


def test_placeholders_are_never_sampled(vlm, vlm_server):
    """The likeliest token made an image's placeholder: the server does not take it, and both sides leave it out."""
    with on_server(vlm, vlm_server) as (rollouts, policy, config, device):
        prompt = rollouts.run.prompts[1]
        greedy = {"n": 1, "max_tokens": 1, "temperature": 0.0}
        (first,) = rollouts.pool.servers[0].generate(prompt.token_ids, greedy)
        image = policy.config.image_token_id
        with torch.no_grad():
            head = policy.get_output_embeddings().weight
            head[image] = 2 * head[first.token_ids[0]]
            logits = policy(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1]
        assert logits.argmax() == image
        rollouts.publish(policy, 1)
        assert rollouts.pool.servers[0].generate(prompt.token_ids, greedy)[0].token_ids != [image]
        worst, groups = worst_mismatch(rollouts, policy, config, device)
        assert worst <= 1e-4
        assert not any(image in c.token_ids for group in groups for c in group.completions)


def test_a_second_turn_after_an_image(vlm, vlm_server):
    """The prompt's images go along; the rest of the ids are sent as they are."""
    with on_server(vlm, vlm_server) as (rollouts, policy, config, _):
        (client,) = rollouts.pool.servers
        prompt, images = processed(rollouts.run.prompts[0])
        (turn,) = client.generate(prompt.token_ids, {"n": 1, "max_tokens": 3}, images=images)
        words = [30, 31]
        so_far = [*prompt.token_ids, *turn.token_ids, *words]
        (reply,) = client.generate(so_far, {"n": 1, "max_tokens": 4}, images=images)
        group = Group(prompt, [turn.then(words, reply)], advantages=[0.0])
        (micro,) = micro_batches([group], 10_000, config)
        logprobs = token_logprobs(policy, micro.packed, micro.images, config)
        gap = (logprobs - micro.sampler_logprobs).abs().where(micro.mask > 0, 0)
        assert gap.max() <= 1e-4


def test_what_no_server_or_policy_takes_is_refused(vlm, vlm_server):
    """Placeholders without images, other tokens for an image, more images than the server was told."""
    sampling = {"n": 2, "max_tokens": 3}
    with on_server(vlm, vlm_server) as (rollouts, policy, config, _):
        (client,) = rollouts.pool.servers
        prompt, images = processed(rollouts.run.prompts[0])
        with pytest.raises(ValueError, match="pass images=prompt.images"):
            client.generate(prompt.token_ids, sampling)
        with pytest.raises(ValueError, match="placeholders of images"):
            client.generate([*prompt.token_ids, policy.config.image_token_id], sampling, images)
        odd = [*prompt.token_ids[:-1], prompt.token_ids[-1] + 1]
        with pytest.raises(ServerError, match="a prompt has 25 tokens on .* and 25 here"):
            client.generate(odd, sampling, images)
        assert len(client.generate(prompt.token_ids, sampling, images)) == 2

        (three,) = load(lambda: [{"prompt": "three", "images": [picture(0)] * 3}])
        with pytest.raises(ServerError, match=r"row 0 of dataset_id: .*(At most|at most) 2 image"):
            sample_group(Group(three), rollouts.pool, rollouts.run.processor, config)


@pytest.mark.slow
def test_the_tiny_vlm_learns(tmp_path):
    """About four minutes: recipes/tiny_vlm.py, from what it was taught to 20 points more: runs differ, 30 to 42."""
    build(tmp_path, seed=0)
    with server(str(tmp_path / "model"), tmp_path / "log", "--max-num-seqs", "256") as started:
        places = {"model_id": tmp_path / "model", "output_dir": tmp_path / "run"}
        words = flags(**places, vllm_urls=started.wait())
        recipe = ROOT / "recipes" / "tiny_vlm.py"
        on_forked_ranks(1, ROOT / "train.py", recipe, *words, status=0, timeout_s=2400)
    evaluated = [row for row in read(tmp_path, "metrics") if "eval/accuracy" in row]
    before, after = (evaluated[place]["eval/accuracy"] for place in (0, -1))
    assert before <= 0.5
    assert after >= before + 0.2
