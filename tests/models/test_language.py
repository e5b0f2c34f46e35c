"""Language models load from everywhere, agree with Hugging Face, can be read and edited."""

import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny import BOS, VOCAB, save_gpt2, save_gptj, save_neox, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from iclutils import IclError, models, zoo
from iclutils.files import sha256
from iclutils.interp import invariants
from iclutils.models import language


@pytest.mark.parametrize(
    ("save", "fold"), [(save_gpt2, True), (save_neox, False), (save_gptj, False)]
)
def test_whose_attention_can_be_edited_is_measured(tmp_path, monkeypatch, save, fold):
    """The same answer as an edit in the open: does halving the attention change anything?"""
    editable = save != save_gptj
    save(tmp_path)
    bridge, x = models.load(tmp_path, fold=fold), tokens(1, 6)
    plain = models.logits(bridge, x)
    assert invariants.editable(bridge) == editable
    torch.testing.assert_close(models.logits(bridge, x), plain, msg="the probe left a trace")
    hook = "blocks.0.attn.hook_pattern", lambda value, hook: value / 2
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = bridge.run_with_hooks(x, fwd_hooks=[hook])
    assert torch.equal(out, plain) != editable
    monkeypatch.setattr(type(bridge), "run_with_hooks", None)
    assert invariants.editable(bridge) == editable, "measured once, then remembered"


@pytest.mark.shared
def test_a_hub_checkpoint_with_the_real_tokenizer(tmp_path, shared, monkeypatch):
    """The whole hub path but for the download: pins, checksums, vocabulary of 50,257."""
    network = save_gpt2(tmp_path, vocab_size=50257, bos_token_id=50256, eos_token_id=50256)
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "gpt2-tokenizer" / file, tmp_path)
    pinned = models.HUB["gpt2"].sha256
    for file in ("vocab.json", "merges.txt"):
        assert sha256(tmp_path / file) == pinned[file]
    asked = {}

    def snapshot(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    ours = {name: sha256(tmp_path / name) for name in pinned}
    monkeypatch.setattr(language, "snapshot_download", snapshot)
    made = language.HubModel("openai-community/gpt2", "6" * 40, ours)
    monkeypatch.setitem(models.HUB, "gpt2", made)
    bridge = models.load("gpt2")
    assert asked["repo"] == "openai-community/gpt2"
    assert asked["revision"] == "6" * 40
    ids = bridge.to_tokens("Review: a great movie", prepend_bos=False)
    assert bridge.to_str_tokens(ids[0]) == ["Review", ":", " a", " great", " movie"]
    with torch.no_grad():
        expected = network(ids).logits
    torch.testing.assert_close(models.logits(bridge, ids), expected, atol=1e-4, rtol=1e-4)

    (tmp_path / "merges.txt").write_text("changed")
    with pytest.raises(IclError, match=r"merges.txt .*pinned SHA-256.*Delete that file"):
        models.load("gpt2")


def test_a_tokenizer_is_the_model_s_own_or_given(tmp_path):
    """A folder without one gives a model without one; zoo models write numbers."""
    network = save_gpt2(tmp_path).half()
    network.save_pretrained(tmp_path)
    bare = models.load(tmp_path)
    assert not any(p.requires_grad for p in bare.parameters())
    assert {p.dtype for p in bare.parameters()} == {torch.float32}
    with pytest.raises(IclError, match=r"no tokenizer: .* as tokenizer="):
        models.tokenizer(bare)
    numbers = models.load(tmp_path, tokenizer="numbers")
    assert numbers.to_tokens("3 4").tolist() == [[BOS, 3, 4]]
    with pytest.raises(IclError, match="its tokens are numbers"):
        models.words(numbers)
    letters = Tokenizer(WordLevel({chr(32 + i): i for i in range(VOCAB)}, unk_token=chr(32 + BOS)))
    given = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=chr(32 + BOS))
    read = models.words(models.load(tmp_path, tokenizer=given))
    assert read.convert_ids_to_tokens([1]) == ["!"]


def test_random_weights_are_those_of_transformer_lens(capsys):
    from transformer_lens.tools.analysis import random_init_bridge

    ours = models.random_init("induction-0", seed=3)
    theirs = random_init_bridge(
        str(zoo.folder("induction-0")), seed=3, device="cpu", tokenizer=language._numbers(512, 511)
    )
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in ours.named_parameters())


class Forgetful:
    """A network that takes a cache, hands back an empty one and reads the last token alone."""

    cfg = SimpleNamespace(device="cpu", d_vocab=9)

    def __init__(self, remembers):
        self.original_model = SimpleNamespace(forward=lambda past_key_values=None: None)
        self.remembers = remembers

    def __call__(self, tokens, past_key_values=None, use_cache=False, return_type=""):
        known = past_key_values if past_key_values is not None and self.remembers else 0
        logits = (tokens.cumsum(1) + known)[..., None] * torch.ones(9)
        return (logits, tokens.sum()) if use_cache else logits


def test_versions_that_lose_the_cache_are_named_when_a_model_is_loaded():
    language._check_cache(Forgetful(remembers=True), "mine")
    message = r"'mine' gives other logits with a cache.*transformers 5.* and transformer-lens 4"
    with pytest.raises(IclError, match=message):
        language._check_cache(Forgetful(remembers=False), "mine")
