"""Language models load from everywhere, agree with Hugging Face, can be read and edited."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny import BOS, VOCAB, save_gpt2, save_gptj, save_grouped, save_neox, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from iclutils import IclError, models, zoo
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
    tokens = torch.tensor([[1, 2, 3]])
    whole = torch.full((9,), 6)
    language._check_cache(Forgetful(remembers=True), "mine", tokens, whole)
    message = r"'mine' gives other logits with a cache.*transformers 5.* and transformer-lens 4"
    with pytest.raises(IclError, match=message):
        language._check_cache(Forgetful(remembers=False), "mine", tokens, whole)


def test_edits_and_twins(tmp_path):
    """Catches an edit, or a twin with random weights, of the network after it was written out."""
    save_grouped(tmp_path)
    seen = []

    def edit(network):
        seen.append(network.model.layers[0].self_attn.k_proj.weight.shape)
        network.model.layers[0].self_attn.k_proj.weight[8:] = 0

    edited = models.edit_weights(tmp_path, edit)
    assert seen == [(16, 24)], "an edit is of the published network"
    assert edited.W_K.shape == edited.W_Q.shape == (3, 4, 24, 8)
    assert edited.W_K[0, :2].any()
    assert not edited.W_K[0, 2:].any()
    twin = models.random_init(tmp_path, 0)
    assert torch.equal(twin.W_V[:, 0], twin.W_V[:, 1])
    assert not torch.equal(twin.W_V[:, 1], twin.W_V[:, 2])
