"""Every recipe: it parses, its layout is legal on as many devices as it names, and it trains.

The recipes are for GPUs, and for large models. `OTHERWISE` says what the dry run of each replaces,
and `TINY` what is replaced to train it here; everything else is the recipe's.
"""

import email
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli import main
from lightning_megatron.cli.init import commands_of
from lightning_megatron.testing import WorkerPool
from tests.recipes.dry_run import RECIPES, dry_run, problems
from tests.recipes.memory import gigabytes

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

CPU = "--trainer.accelerator=cpu"
OTHERWISE = {
    "pretrain-1b": [CPU],
    "pretrain-8b": [CPU],
    "pretrain-8b-fp8": [CPU],
    # The sizes of the checkpoint that the recipe begins with.
    "finetune-qwen3": [CPU, "--model.config=qwen3-8b"],
    "finetune-adopted": [CPU, "--model.directory=qwen"],
}
"""What the dry run replaces: this machine has no GPU, and no checkpoint of Qwen3."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """How a recipe is trained in a moment."""

    ranks: int
    options: Sequence[str]


SHORT = [
    *("--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=1"),
    "--trainer.enable_model_summary=false",
]
TEXT = f"--data.files=[{Path(email.__file__).parent}/*.py]"  # to list all modules takes longer
BYTES = ["--data.seq_len=16", "--data.max_bytes=200000", "--data.batch_size=8", TEXT]
SIZES = ("hidden_size=32", "num_layers=4", "num_heads=4", "mlp_size=32", "max_seq_len=16")
SMALL = [f"--model.config.{size}" for size in SIZES]
TWO_BLOCKS = "--model.config.num_layers=2"
SMALL_LLAMA = [
    "--model.config={vocab_size: 256, num_kv_heads: 4, " + ", ".join(SIZES).replace("=", ": ") + "}"
]
OFTEN = "--trainer.callbacks.every_n_train_steps=3"  # of the ModelCheckpoint
TWO_BATCHES = "--trainer.accumulate_grad_batches=2"
NOT_SPREAD = "--trainer.strategy.sequence_parallel=false"  # over tp, as in pretrain-1b
GRAPHS_ONLY = "--trainer.strategy.compile.backend=eager"
"""Code of a compiler takes longer to make than it takes to train."""

TINY = {
    "fault-tolerant": Tiny(ranks=2, options=[*SMALL, *BYTES, OFTEN]),
    "diffusion": Tiny(
        ranks=2,
        options=[
            "--trainer.limit_train_batches=3",
            *("--model.size=16", "--model.layers=2", "--model.heads=2"),
            *("--model.picture=8", "--data.picture=8", "--data.number=512", "--data.batch_size=8"),
        ],
    ),
    "long_context": Tiny(
        ranks=2,
        options=["--trainer.limit_train_batches=3", *SMALL, *BYTES],
    ),
    "mixture": Tiny(
        ranks=2,
        options=["--trainer.limit_train_batches=3", *SMALL, *BYTES],
    ),
    "tokens": Tiny(
        ranks=2,
        options=[
            *("--trainer.limit_train_batches=3", "--trainer.strategy.tp=1"),
            *(*SMALL, "--data.seq_len=16", "--data.batch_size=8"),
        ],
    ),
    "pretrain-1b": Tiny(
        ranks=2,
        options=[
            *(CPU, "--model.config.vocab_size=256", "--model.config.num_kv_heads=4"),
            *(*SMALL, TWO_BLOCKS, *BYTES, OFTEN, GRAPHS_ONLY),
        ],
    ),
    "pretrain-8b": Tiny(
        ranks=2,
        options=[
            *(CPU, "--trainer.num_nodes=1", "--trainer.strategy.tp=1", NOT_SPREAD),
            *(*SMALL_LLAMA, TWO_BLOCKS, *BYTES, "--data.batch_size=2", OFTEN),
        ],
    ),
    # FP8 products need sizes that are multiples of 16; without `keep_*` two blocks have them.
    "pretrain-8b-fp8": Tiny(
        ranks=2,
        options=[
            *("--trainer.plugins.keep_first=0", "--trainer.plugins.keep_last=0", TWO_BATCHES),
            *(CPU, *SMALL_LLAMA, TWO_BLOCKS, *BYTES, OFTEN, GRAPHS_ONLY),
        ],
    ),
    "finetune-qwen3": Tiny(
        ranks=2,
        options=[
            *(CPU, "--data.tokenizer=qwen", "--data.files=[corpus.txt]", "--data.seq_len=16"),
            *("--ckpt_path=qwen3.ckpt", OFTEN, TWO_BATCHES),
        ],
    ),
    "finetune-adopted": Tiny(
        ranks=2,
        options=[
            *(CPU, "--data.tokenizer=qwen", "--data.files=[corpus.txt]", "--data.seq_len=16"),
            *("--model.directory=qwen", OFTEN, TWO_BATCHES),
        ],
    ),
}

NOT_COMPILED = "--trainer.strategy.compile.scope=none"
LEFT_OUT = dict.fromkeys(("pretrain-1b", "pretrain-8b-fp8"), NOT_COMPILED)
"""What `make test-all` alone adds: compiled blocks, most of the time of these recipes."""


def test_every_recipe_is_trained() -> None:
    assert sorted([*TINY, "quickstart"]) == NAMES  # quickstart: by `tests.launched`


@pytest.mark.parametrize("recipe", NAMES)
def test_the_layout_is_legal_on_the_devices_that_the_recipe_names(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a dry run looks for folders to write to
    if recipe == "finetune-adopted":
        _small_qwen3(tmp_path)
    if recipe == "tokens":
        _small_corpora(tmp_path, monkeypatch)
    given = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["trainer"]
    cli = dry_run(recipe, *OTHERWISE.get(recipe, []))
    assert cli.trainer.world_size == given["devices"] * given.get("num_nodes", 1)
    assert problems(cli) == []
    head = (RECIPES / f"{recipe}.yaml").read_text().partition("\nseed_everything")[0]
    assert ("ot yet run on" in head) == (given["accelerator"] == "gpu" or "sbatch" in head)
    told = re.search(
        r"memory of a GPU: ([\d.]+) GB for .*? ([\d.]+) .*? ([\d.]+) ", head, re.DOTALL
    )
    # What an adopted model needs depends on its directory.
    assert (told is None) == (given["accelerator"] == "cpu" or recipe == "finetune-adopted")
    if told is not None:
        assert list(told.groups()) == _gigabytes(cli)


def _gigabytes(cli: Any) -> list[str]:
    options, data = cli.trainer.strategy.options, cli.datamodule
    tokens = (options.microbatch_size or data.batch_size) * data.seq_len
    return gigabytes(cli.model.config, options, options.degrees(cli.trainer.world_size), tokens)


def fit(recipe: str, folder: str, options: Sequence[str]) -> list[str]:
    """Train on this rank; checkpoints that are left behind."""
    os.chdir(folder)
    assert main(["fit", "--config", recipe, *options]) == 0
    return [str(path) for path in Path().rglob("*.ckpt")]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        *((recipe, [LEFT_OUT[recipe]] if recipe in LEFT_OUT else []) for recipe in TINY),
        *(pytest.param(recipe, [], marks=pytest.mark.thorough) for recipe in LEFT_OUT),
    ],
)
def test_a_small_copy_trains_and_saves(
    recipe: str,
    more: list[str],
    tmp_path: Path,
    pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = TINY[recipe]
    if recipe == "tokens":
        _small_corpora(tmp_path, monkeypatch)
    if recipe.startswith("finetune"):
        _small_qwen3(tmp_path)
    options = [*SHORT, f"--trainer.devices={tiny.ranks}", *tiny.options, *more]
    [found, *_] = pool.run(tiny.ranks, fit, recipe, str(tmp_path), options)
    assert (tmp_path / "runs").is_dir()
    [checkpoint] = [path for path in found if "step-3.ckpt" in path]
    if recipe == "finetune-qwen3":
        command = ["convert", "--to", "hf", str(tmp_path / checkpoint), str(tmp_path / "tuned")]
        assert main([*command, "--like", str(tmp_path / "qwen")]) == 0
    if recipe.startswith("finetune"):
        assert list((tmp_path / "tuned").glob("*.safetensors"))


def _small_corpora(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a few modules, by the commands at the recipe's head."""
    pytest.importorskip("tokenizers")
    from lightning_megatron.recipes.tokens_corpus import main as write_corpora

    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["tokens_corpus.py", "--vocab-size=300", "--modules=12"])
    [first, *preparation, last] = map(shlex.split, commands_of("tokens"))
    assert first == ["python", "tokens_corpus.py"]
    write_corpora()
    for program, *arguments in preparation:
        assert program == "lightning-megatron"
        assert main([*arguments, "--workers=1", "--no-progress"]) == 0
    assert last == ["lightning-megatron", "fit", "--config", "tokens.yaml"]


def _small_qwen3(folder: Path) -> None:
    """A model directory with a tokenizer, the checkpoint of it, and a text."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: index for index, word in enumerate(["<end>", *"abcdefghijklmnop"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    fast.save_pretrained(folder / "qwen")
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "qwen")
    (folder / "corpus.txt").write_text("abcdefghijklmnop" * 200)
    assert main(["convert", "--from-hf", str(folder / "qwen"), str(folder / "qwen3.ckpt")]) == 0
